"""Batch-invariant attention where there is no kernel for it: keys in blocks of a fixed length from their sequence's
first token.

Scores, then exponentials summed block by block, then weighted values block by block. A block that is masked for a query
(later tokens, padding, an empty end) adds exact zeros. So neither the batch's length, nor its padding, nor a cache of
earlier keys changes a bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.invariant import operators as invariant

BLOCK_KEYS = 64
"""Keys per block."""
_ELEMENTS = 1 << 20
"""Largest number of scores, or of key elements, of the sequences computed at once."""


def attention(
    q_BHSd: Tensor,
    k_BhLd: Tensor,
    v_BhLd: Tensor,
    mask_BSL: Tensor,
    first_B: Tensor | None,
    rule: ScoreRule,
) -> Tensor:
    """Compute (B, H, S, d) attention under a mask, see `query_blocks.attention`; of the rule, the soft cap and sinks
    are read."""
    (B, H, S, d), heads, L = q_BHSd.shape, k_BhLd.shape[1], k_BhLd.shape[2]
    group, dtype = H // heads, accumulate_dtype(q_BHSd.dtype)
    num_blocks = -(-L // BLOCK_KEYS)
    columns_BL = torch.arange(num_blocks * BLOCK_KEYS, device=q_BHSd.device).expand(B, -1)
    columns_BL = columns_BL if first_B is None else columns_BL + first_B[:, None]
    inside_BL, columns_BL = columns_BL < L, columns_BL.clamp(max=L - 1)
    sinks_hG = None if rule.sinks_H is None else rule.sinks_H.to(dtype).view(heads, group)
    y_BHSd = q_BHSd.new_empty(B, S, H, d).transpose(1, 2)
    # rows in the order of their queries, so that a block of keys concerns a tail of the rows
    q_BhRd = F.pad(q_BHSd.unflatten(1, (heads, group)).transpose(2, 3).flatten(2, 3), (0, -d % 16))
    y_BhRd = y_BHSd.unflatten(1, (heads, group)).transpose(2, 3)
    rows = min(S * group, invariant.LARGE_BLOCK_ROWS)
    at_once = max(1, _ELEMENTS // max(heads * num_blocks * BLOCK_KEYS * max(rows, d), 1))
    with without_autocast(q_BHSd.device):
        for start in range(0, B, at_once):
            some = slice(start, start + at_once)
            columns, inside = columns_BL[some], inside_BL[some]
            mask = mask_BSL[some].gather(2, columns[:, None].expand(-1, S, -1)) & inside[:, None]
            index = columns[:, None, :, None].expand(-1, heads, -1, d)
            k_nXKd, v_nXKd = (
                F.pad(t[some].gather(2, index), (0, -d % 16))
                .to(dtype)
                .unflatten(2, (num_blocks, BLOCK_KEYS))
                .permute(2, 0, 1, 3, 4)
                .contiguous()
                .flatten(1, 2)
                for t in (k_BhLd, v_BhLd)
            )
            for first in range(0, S * group, invariant.LARGE_BLOCK_ROWS):
                part = slice(first, min(first + invariant.LARGE_BLOCK_ROWS, S * group))
                # later keys are masked for all of these rows
                last = -(-(L - S + (part.stop - 1) // group + 1) // BLOCK_KEYS)
                of_row = torch.arange(part.start, part.stop, device=q_BHSd.device)
                mask_XRL = mask[:, of_row // group, : last * BLOCK_KEYS].repeat_interleave(heads, 0)
                sinks = None
                if sinks_hG is not None:
                    sinks = sinks_hG[:, of_row % group].repeat(len(mask), 1)[..., None]
                q_XRd = q_BhRd[some, :, part].to(dtype).flatten(0, 1)
                y = _rows(q_XRd, k_nXKd[:last], v_nXKd[:last], mask_XRL, sinks, rule.softcap, d)
                y = y[..., :d].unflatten(0, (-1, heads)).to(y_BHSd.dtype)
                y_BhRd[some, :, of_row // group, of_row % group] = y
    return y_BHSd


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
    q_XRd = q_XRd.expand(n, X, R, d).flatten(0, 1)
    s_XRK = invariant.batched_product(q_XRd, k_nXKd.flatten(0, 1).mT)
    s_XRL = s_XRK.unflatten(0, (n, X)).permute(1, 2, 0, 3).flatten(2) * head_dim**-0.5
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
