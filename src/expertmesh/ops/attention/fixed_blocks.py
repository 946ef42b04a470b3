"""Batch-invariant attention: the result of a query is bitwise the same in every batch.

Keys are processed in blocks of a fixed length, counted from the first real token of their sequence: scores, then
exponentials summed block by block, then weighted values block by block. A block that is masked for a query (later
tokens, padding, an empty end) adds exact zeros. So neither the batch's length, nor its padding, nor a cache of earlier
keys changes a bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.attention import paged_native, query_blocks
from expertmesh.ops.attention.scores import (
    PLAIN,
    ScoreRule,
    as_mask,
    in_window,
)
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.plain_call import runs_plainly

BLOCK_KEYS = 64
"""Keys per block."""
_ELEMENTS = 1 << 20
"""Largest number of scores, or of key elements, of the sequences computed at once."""


def attention(
    q_BHSd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, visible: Visible, rule: ScoreRule | None = None
) -> Tensor:
    """Compute softmax attention with scale 1 / sqrt(d), in FP32 (FP64 for FP64) inside.

    Args:
        q_BHSd: (B, H, S, d) queries, the last S of L tokens.
        k_BHLd: (B, heads, L, d) keys; heads divides H.
        v_BHLd: (B, heads, L, d) values.
        visible: the keys that each query may attend to, causal.
        rule: window, chunks, soft cap and sinks; None: none of them.

    Returns:
        (B, H, S, d) in the type of q; queries without a visible key get 0. Differentiable (ordinary gradients).
    """
    B, _, S, _ = q_BHSd.shape
    L, device = k_BHLd.shape[2], q_BHSd.device
    rule = PLAIN if rule is None else rule
    is_plain = runs_plainly(q_BHSd, k_BHLd, v_BHLd, rule.sinks_H)
    is_bare = is_plain and visible.mask is None and visible.is_causal
    if is_bare and paged_native.serves(q_BHSd, k_BHLd, v_BHLd):
        return paged_native.of_sequences(q_BHSd, k_BHLd, v_BHLd, rule=rule)
    visible = in_window(visible, rule, num_keys=L, device=device)
    mask = as_mask(visible, num_keys=L, device=device)[:, 0].expand(B, S, L)
    first_B = None if visible.first_B is None else visible.first_B.expand(B)
    run = _plain_attention if is_plain else _attention
    y: Tensor = run(q_BHSd, k_BHLd, v_BHLd, rule.sinks_H, mask, first_B, rule.softcap)
    return y


def _plain_attention(
    q_BHSd: Tensor,
    k_BHLd: Tensor,
    v_BHLd: Tensor,
    sinks_H: Tensor | None,
    mask_BSL: Tensor,
    first_B: Tensor | None,
    softcap: float | None,
) -> Tensor:
    B, H, S, d = q_BHSd.shape
    heads, L = k_BHLd.shape[1:3]
    group = H // heads
    dtype = accumulate_dtype(q_BHSd.dtype)
    y_BHSd = torch.empty_like(q_BHSd, memory_format=torch.contiguous_format)
    if q_BHSd.numel() == 0:
        return y_BHSd
    if paged_native.serves(q_BHSd, k_BHLd, v_BHLd):
        rule = ScoreRule(softcap=softcap, sinks_H=sinks_H)
        return paged_native.of_sequences(q_BHSd, k_BHLd, v_BHLd, first_B, mask_BSL, rule=rule)
    num_blocks = -(-L // BLOCK_KEYS)
    # rows in the order of their queries, so that a block of keys concerns a tail of the rows
    q_BhRd = q_BHSd.unflatten(1, (heads, group)).transpose(2, 3).flatten(2, 3)
    y_BhRd = y_BHSd.view(B, heads, group, S, d).transpose(2, 3)
    sinks_hG = None if sinks_H is None else sinks_H.to(dtype).view(heads, group)
    rows = min(S * group, invariant.LARGE_BLOCK_ROWS)
    at_once = max(1, _ELEMENTS // (heads * num_blocks * BLOCK_KEYS * max(rows, d)))
    with without_autocast(q_BHSd.device):
        for start in range(0, B, at_once):
            part = slice(start, start + at_once)
            y = _some(
                q_BhRd[part].to(dtype),
                k_BHLd[part],
                v_BHLd[part],
                mask_BSL[part],
                None if first_B is None else first_B[part],
                sinks_hG,
                softcap,
            )
            y_BhRd[part].copy_(y.unflatten(2, (S, group)))
    return y_BHSd


def _some(
    q_BhRd: Tensor,
    k_BhLd: Tensor,
    v_BhLd: Tensor,
    mask_BSL: Tensor,
    first_B: Tensor | None,
    sinks_hG: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """(B, h, R, d) attention of some sequences' queries; rows are in the order of positions."""
    (B, h, R, d), (S, L) = q_BhRd.shape, mask_BSL.shape[1:]
    group, dtype = R // S, q_BhRd.dtype
    num_blocks = -(-L // BLOCK_KEYS)
    more, behind = -d % 16, num_blocks * BLOCK_KEYS - L
    if first_B is None:
        mask_BSL = F.pad(mask_BSL, (0, behind))
    else:
        columns_L = torch.arange(num_blocks * BLOCK_KEYS, device=q_BhRd.device)
        column_BL = columns_L + first_B[:, None]
        inside_BL = column_BL < L
        column_BL = column_BL.clamp(max=L - 1)
        mask_BSL = mask_BSL.gather(2, column_BL[:, None].expand(-1, S, -1)) & inside_BL[:, None]

    def in_blocks(t_BhLd: Tensor) -> Tensor:
        """(blocks, B * h, keys of a block, d rounded up to 16)."""
        if first_B is None:
            t = F.pad(t_BhLd, (0, more, 0, behind))
        else:
            index = column_BL[:, None, :, None].expand(-1, h, -1, d)
            t = F.pad(t_BhLd.gather(2, index), (0, more))
        t = t.unflatten(2, (num_blocks, BLOCK_KEYS)).permute(2, 0, 1, 3, 4)
        return t.new_empty(t.shape, dtype=dtype).copy_(t).flatten(1, 2)

    k_nXKd, v_nXKd = in_blocks(k_BhLd), in_blocks(v_BhLd)
    q_XRd = F.pad(q_BhRd, (0, more)).flatten(0, 1)
    y_BhRd = torch.empty_like(q_BhRd, memory_format=torch.contiguous_format)
    for start in range(0, R, invariant.LARGE_BLOCK_ROWS):
        stop = min(start + invariant.LARGE_BLOCK_ROWS, R)
        # later keys are masked for all of these rows
        seen = min(-(-(L - S + (stop - 1) // group + 1) // BLOCK_KEYS), num_blocks)
        of_row = torch.arange(start, stop, device=q_BhRd.device)
        mask = mask_BSL[:, of_row // group, : seen * BLOCK_KEYS].repeat_interleave(h, 0)
        sinks = None
        if sinks_hG is not None:
            sinks = sinks_hG[:, of_row % group].repeat(B, 1)[..., None]
        y = _rows(q_XRd[:, start:stop], k_nXKd[:seen], v_nXKd[:seen], mask, sinks, softcap, d)
        y_BhRd[:, :, start:stop] = y[..., :d].unflatten(0, (B, h))
    return y_BhRd


def _rows(
    q_XRd: Tensor,
    k_nXKd: Tensor,
    v_nXKd: Tensor,
    mask_XRL: Tensor,
    sinks_XR1: Tensor | None,
    softcap: float | None,
    head_dim: int,
) -> Tensor:
    """Attention of at most `LARGE_BLOCK_ROWS` rows in each of X heads over n blocks of K keys."""
    n, X, K, d = k_nXKd.shape
    R = q_XRd.shape[1]
    q_ZRd = q_XRd.expand(n, X, R, d).flatten(0, 1)
    s_ZRK = invariant.batched_product(q_ZRd, k_nXKd.flatten(0, 1).mT)
    s_XRL = s_ZRK.unflatten(0, (n, X)).permute(1, 2, 0, 3).flatten(2) * head_dim**-0.5
    if softcap is not None:
        s_XRL = softcap * invariant.pointwise(s_XRL / softcap, "tanh")
    s_XRL = s_XRL.masked_fill(~mask_XRL, -torch.inf)
    largest = s_XRL.amax(2, keepdim=True)
    if sinks_XR1 is not None:
        largest = torch.maximum(largest, sinks_XR1)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    p_nXRK = invariant.pointwise(s_XRL - largest, "exp").unflatten(2, (n, K)).permute(2, 0, 1, 3)
    p_nXRK = p_nXRK.contiguous()
    total = largest.new_zeros(X, R, 1)
    if sinks_XR1 is not None:
        total += invariant.pointwise(sinks_XR1 - largest, "exp")
    y_XRd = q_XRd.new_zeros(X, R, d)
    y_ZRd = invariant.batched_product(p_nXRK.flatten(0, 1), v_nXKd.flatten(0, 1))
    # summed block by block, so that later blocks add exact zeros
    for sums, y in zip(invariant.row_sum(p_nXRK), y_ZRd.unflatten(0, (n, X)), strict=True):
        total += sums
        y_XRd += y
    return torch.where(total > 0, y_XRd / total, 0.0)


_attention = torch.library.custom_op(
    "expertmesh::invariant_attention", _plain_attention, mutates_args=()
)
_attention.register_fake(
    lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format)
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.softcap = inputs[6]


def _backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients from ordinary attention under autograd, which computes the same function."""
    *inputs, mask_BSL = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    with torch.enable_grad(), without_autocast(grad_BHSd.device):
        own: list[Any] = [
            None if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(inputs, needs, strict=True)
        ]
        q, k, v, sinks = own
        rule = ScoreRule(softcap=ctx.softcap, sinks_H=sinks)
        mask = mask_BSL[:, None]
        if rule.is_plain:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=q.shape[1] > k.shape[1]
            )
        else:
            seen = Visible(q.shape[2], mask=mask)  # the mask includes the window
            y = query_blocks.attention(q, k, v, seen, rule)
        wanted = [t for t, needed in zip(own, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(y, wanted, grad_BHSd))
    return *(next(found) if needed else None for needed in needs), None, None, None


_attention.register_autograd(_backward, setup_context=_save)
