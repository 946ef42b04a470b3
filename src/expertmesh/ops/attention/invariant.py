"""Attention whose result for a query is the same to the bit whatever batch its sequence sits in.

Keys go through in blocks of a fixed length, counted from the first real token of their sequence: scores, then the
exponentials summed block by block, then the weighted values block by block. A block that a query may not look at, be
it later tokens, padding or an empty end, adds exact zeros; so neither the length of the batch nor its padding, nor
whether earlier keys come from a cache, changes a bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.attention.scores import (
    PLAIN,
    ScoreRule,
    as_mask,
    attention_by_products,
    in_window,
)
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.invariant.operators import BlockProduct
from expertmesh.ops.plain_call import runs_plainly

BLOCK_KEYS = 64
"""Keys of one block."""


def attention(
    q_BHSd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, visible: Visible, rule: ScoreRule | None = None
) -> Tensor:
    """Softmax attention with scale 1 / sqrt(d), in FP32 (FP64 for FP64) inside.

    Args:
        q_BHSd: (B, H, S, d) queries, the last S of L tokens.
        k_BHLd: (B, heads, L, d) keys; heads divides H.
        v_BHLd: values, like the keys.
        visible: which keys each query may look at, in the causal order.
        rule: a window, a cap and sinks.

    Returns:
        (B, H, S, d) in the type of q; queries that may look nowhere get 0. Differentiable (ordinary gradients).
    """
    B, _, S, _ = q_BHSd.shape
    L, device = k_BHLd.shape[2], q_BHSd.device
    rule = PLAIN if rule is None else rule
    visible = in_window(visible, rule, num_keys=L, device=device)
    mask = as_mask(visible, num_keys=L, device=device)[:, 0].expand(B, S, L)
    first_B = visible.first_B
    if first_B is None:
        first_B = torch.zeros(B, dtype=torch.int64, device=device)
    is_plain = runs_plainly(q_BHSd, k_BHLd, v_BHLd, rule.sinks_H)
    run = _plain_attention if is_plain else _attention
    y: Tensor = run(q_BHSd, k_BHLd, v_BHLd, rule.sinks_H, mask, first_B.expand(B), rule.softcap)
    return y


def _plain_attention(
    q_BHSd: Tensor,
    k_BHLd: Tensor,
    v_BHLd: Tensor,
    sinks_H: Tensor | None,
    mask_BSL: Tensor,
    first_B: Tensor,
    softcap: float | None,
) -> Tensor:
    B, H, S, d = q_BHSd.shape
    heads, L = k_BHLd.shape[1:3]
    group = H // heads
    dtype = accumulate_dtype(q_BHSd.dtype)
    y_BHSd = torch.empty_like(q_BHSd, memory_format=torch.contiguous_format)
    if q_BHSd.numel() == 0:
        return y_BHSd
    padded = -(-L // BLOCK_KEYS) * BLOCK_KEYS
    column_BL = torch.arange(padded, device=q_BHSd.device) + first_B[:, None]
    inside_BL = column_BL < L
    column_BL = column_BL.clamp(max=L - 1)
    with without_autocast(q_BHSd.device):
        for b in range(B):
            # rows in the order of the queries, so that a block of keys meets a tail of them
            mask_SL = mask_BSL[b].index_select(1, column_BL[b]) & inside_BL[b]
            mask_RL = mask_SL.repeat_interleave(group, 0)
            for head in range(heads):
                q = q_BHSd[b, head * group : (head + 1) * group].transpose(0, 1)
                k_Ld = k_BHLd[b, head].index_select(0, column_BL[b]).to(dtype)
                v_Ld = v_BHLd[b, head].index_select(0, column_BL[b]).to(dtype)
                q_Rd = q.reshape(S * group, d).to(dtype)
                sinks_R1 = None
                if sinks_H is not None:
                    own = sinks_H[head * group : (head + 1) * group].to(dtype)
                    sinks_R1 = own.repeat(S)[:, None]
                y_Rd = _one_head(q_Rd, k_Ld, v_Ld, mask_RL, (L - S, group), sinks_R1, softcap)
                y = y_Rd.view(S, group, d).transpose(0, 1)
                y_BHSd[b, head * group : (head + 1) * group].copy_(y)
    return y_BHSd


def _one_head(
    q_Rd: Tensor,
    k_Ld: Tensor,
    v_Ld: Tensor,
    mask_RL: Tensor,
    causal: tuple[int, int],
    sinks_R1: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of the queries that share one head of keys; L is a whole number of blocks.

    `causal` is (keys before the first query, queries per position): query r sees keys up to before + r // per.
    """
    (R, d), L = q_Rd.shape, k_Ld.shape[0]
    before, group = causal
    starts = range(0, L, BLOCK_KEYS)
    # earlier queries see nothing of a later block
    tails = [min(max(start - before, 0) * group, R) for start in starts]
    s_RL = q_Rd.new_full((R, L), -torch.inf)
    for start, tail in zip(starts, tails, strict=True):
        keys = slice(start, start + BLOCK_KEYS)
        BlockProduct.of(k_Ld[keys].clone()).into(q_Rd[tail:], s_RL[tail:, keys])
    s_RL.mul_(d**-0.5)
    if softcap is not None:
        s_RL = softcap * invariant.pointwise(s_RL / softcap, "tanh")
    s_RL.masked_fill_(~mask_RL, -torch.inf)
    largest = s_RL.amax(1, keepdim=True)
    if sinks_R1 is not None:
        largest = torch.maximum(largest, sinks_R1)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    p_RL = invariant.pointwise(s_RL - largest, "exp")
    total = q_Rd.new_zeros(R, 1)
    if sinks_R1 is not None:
        total += invariant.pointwise(sinks_R1 - largest, "exp")
    y_Rd = q_Rd.new_zeros(R, d)
    part = torch.empty_like(y_Rd)
    for start, tail in zip(starts, tails, strict=True):
        p = p_RL[tail:, start : start + BLOCK_KEYS]
        total[tail:] += invariant.row_sum(p)
        weight = v_Ld[start : start + BLOCK_KEYS].t().contiguous()
        y_Rd[tail:] += BlockProduct.of(weight).into(p, part[tail:])
    return torch.where(total > 0, y_Rd / total, 0.0)


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
    """Run ordinary attention under autograd: its gradients are those of the same function."""
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
            y = attention_by_products(q, k, v, mask, rule)
        wanted = [t for t, needed in zip(own, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(y, wanted, grad_BHSd))
    return *(next(found) if needed else None for needed in needs), None, None, None


_attention.register_autograd(_backward, setup_context=_save)
