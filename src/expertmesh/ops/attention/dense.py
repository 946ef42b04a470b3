"""Attention over keys that are contiguous per sequence: PyTorch's where it serves, else blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.attention import query_blocks
from expertmesh.ops.attention.scores import ScoreRule, in_window
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.dtypes import accumulate_dtype


def attention(
    q_BHSd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, visible: Visible, rule: ScoreRule | None = None
) -> Tensor:
    """Compute softmax attention with scale 1 / sqrt(d); bits may depend on the batch.

    Args:
        q_BHSd: (B, H, S, d) queries, the last S of L tokens.
        k_BHLd: (B, heads, L, d) keys; heads divides H.
        v_BHLd: (B, heads, L, d) values.
        visible: the keys that each query may attend to.
        rule: window, chunks, soft cap and sinks; None: none of them.

    Returns:
        (B, H, S, d) in the type of q; differentiable.
    """
    if rule is not None:
        if not rule.is_plain:
            return query_blocks.attention(q_BHSd, k_BHLd, v_BHLd, visible, rule)
        visible = in_window(visible, rule, num_keys=k_BHLd.shape[2], device=k_BHLd.device)
    if is_faster_in_blocks(q_BHSd, k_BHLd, visible):
        return query_blocks.attention(q_BHSd, k_BHLd, v_BHLd, visible)
    mask = visible.mask
    if mask is not None and _is_faster_by_products(q_BHSd, k_BHLd):
        return _products(q_BHSd, k_BHLd, v_BHLd, mask)
    # A single new token attends to all keys so far, so it needs no mask. A branch, because with dynamic shapes the
    # condition would be a symbol, which the operator refuses.
    causal = False
    if mask is None and visible.is_causal and q_BHSd.shape[2] > 1:
        causal = True
    is_grouped = q_BHSd.shape[1] > k_BHLd.shape[1]
    if is_grouped and not causal and q_BHSd.shape[2] == 1 and q_BHSd.device.type == "cpu":
        return _one_query(q_BHSd, k_BHLd, v_BHLd, mask)
    return F.scaled_dot_product_attention(
        q_BHSd, k_BHLd, v_BHLd, attn_mask=mask, is_causal=causal, enable_gqa=is_grouped
    )


def is_faster_in_blocks(q_BHSd: Tensor, k_BHLd: Tensor, visible: Visible) -> bool:
    """Whether blocks are faster than PyTorch's (docs/log.md): short causal sequences in BF16 on a CPU."""
    if visible.mask is not None or not query_blocks.is_short(q_BHSd, k_BHLd) or q_BHSd.numel() == 0:
        return False
    S = q_BHSd.shape[2]
    return visible.is_causal and q_BHSd.dtype == torch.bfloat16 and 1 < S == k_BHLd.shape[2]


def _is_faster_by_products(q_BHSd: Tensor, k_BHLd: Tensor) -> bool:
    """Whether masked sequences learn faster by products; PyTorch's backward of short ones takes up to ten times as
    long."""
    is_learned = torch.is_grad_enabled() and q_BHSd.requires_grad
    return is_learned and q_BHSd.shape[1] == k_BHLd.shape[1] and query_blocks.is_short(q_BHSd, k_BHLd)


def _products(q_BHSd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, mask: Tensor) -> Tensor:
    scores = (q_BHSd * q_BHSd.shape[-1] ** -0.5) @ k_BHLd.mT
    dtype = accumulate_dtype(scores.dtype)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=dtype).to(v_BHLd.dtype) @ v_BHLd


def _one_query(q_BH1d: Tensor, k_BhLd: Tensor, v_BhLd: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one query per sequence with a key head's query heads as its queries: keys are read once and not
    repeated (docs/log.md)."""
    q_BhGd = q_BH1d.squeeze(2).unflatten(1, (k_BhLd.shape[1], -1))
    y_BhGd = F.scaled_dot_product_attention(q_BhGd, k_BhLd, v_BhLd, attn_mask=mask)
    return y_BhGd.flatten(1, 2).unsqueeze(2)
