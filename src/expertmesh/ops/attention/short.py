"""Causal attention over short sequences in BF16 on a CPU, as batched matrix products.

PyTorch's fused attention takes two to four times as long as its products, forward and backward (docs/log.md; in FP32 it
is as fast). Here a few sequences at a time pass through all steps, so that their scores stay in the L2 cache. Scores,
softmax and their gradients are FP32. The probabilities are saved for the backward: 3/4 B * H * S * S elements, little
for small S (the first half of the queries needs half of the keys).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.config.short_sequence import HALVED_SEQUENCE, SHORT_SEQUENCE
from expertmesh.ops.dtypes import without_autocast

_BLOCK_ELEMENTS = 1 << 19


def serves(q_BHSd: Tensor, k_BhSd: Tensor) -> bool:
    """Whether `causal_attention` is the fastest choice: short BF16 sequences without cached keys, on a CPU, not compiled.

    It was measured to be faster than `scaled_dot_product_attention` up to SHORT_SEQUENCE tokens.
    """
    S = q_BHSd.shape[2]
    return (
        q_BHSd.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and q_BHSd.dtype == torch.bfloat16
        and 1 < S == k_BhSd.shape[2] <= SHORT_SEQUENCE
        and q_BHSd.numel() > 0
    )


def causal_attention(q_BHSd: Tensor, k_BhSd: Tensor, v_BhSd: Tensor) -> Tensor:
    """Compute causal softmax(q k^T / sqrt(d)) v; differentiable once.

    Args:
        q_BHSd: (B, H, S, d) queries on the CPU, any floating-point type; products are in FP32 or in that type.
        k_BhSd: (B, h, S, d) keys; h divides H, and query head i attends to key head i // (H / h).
        v_BhSd: (B, h, S, d) values.

    Returns:
        (B, H, S, d) in the dtype of q.
    """
    with without_autocast(q_BHSd.device):  # autocast would round the scores to BF16
        y: Tensor = _CausalAttention.apply(q_BHSd, k_BhSd, v_BhSd)
    return y


def _spans(S: int) -> list[tuple[int, int]]:
    """Spans [start, stop) of queries, each with keys before `stop`: the first half of the queries needs half of the keys."""
    half = S // 2
    return [(0, half), (half, S)] if S >= HALVED_SEQUENCE else [(0, S)]


def _blocks(num_sequences: int, elements_of_each: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // elements_of_each)
    return (slice(i, min(i + size, num_sequences)) for i in range(0, num_sequences, size))


class _CausalAttention(torch.autograd.Function):
    """Causal attention in which the M = H / h query heads of a key head are rows of one product; keys and values are not repeated."""

    @staticmethod
    def forward(ctx: Any, q_BHSd: Tensor, k_BhSd: Tensor, v_BhSd: Tensor) -> Tensor:
        (B, H, S, d), h = q_BHSd.shape, k_BhSd.shape[1]
        N, M = B * h, H // h
        q_NMSd = q_BHSd.reshape(N, M, S, d)
        k_NSd, v_NSd = k_BhSd.reshape(N, S, d), v_BhSd.reshape(N, S, d)
        spans = _spans(S)
        parts = [q_NMSd.new_empty(N, M * (stop - start), stop) for start, stop in spans]
        hidden = [
            q_NMSd.new_full((stop - start, stop), -math.inf, dtype=torch.float32)
            .triu_(1 + start)
            .repeat(M, 1)
            for start, stop in spans
        ]
        y_NMSd = torch.empty_like(q_NMSd)
        for some in _blocks(N, M * S * S):
            q, k_dS = q_NMSd[some].float(), k_NSd[some].float().transpose(1, 2)
            for (start, stop), p, hides in zip(spans, parts, hidden, strict=True):
                rows = q[:, :, start:stop].flatten(1, 2)
                scores = torch.baddbmm(hides, rows, k_dS[..., :stop], alpha=d**-0.5)
                p[some] = torch.softmax(scores, dim=-1)
                y = torch.bmm(p[some], v_NSd[some, :stop])
                y_NMSd[some, :, start:stop] = y.unflatten(1, (M, -1))
        ctx.save_for_backward(q_NMSd, k_NSd, v_NSd, *parts)
        ctx.num_key_heads = h
        return y_NMSd.view(B, H, S, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with without_autocast(grad_BHSd.device):
            return _gradients(ctx, grad_BHSd)


def _gradients(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_NMSd, k_NSd, v_NSd, *parts = ctx.saved_tensors
    B, H, S, d = grad_BHSd.shape
    N, M = q_NMSd.shape[:2]
    grad_NMSd = grad_BHSd.reshape(N, M, S, d)
    d_q, d_k, d_v = (torch.empty_like(t) for t in (q_NMSd, k_NSd, v_NSd))
    # the last span covers all keys and comes first, so that the others add to its result
    spans = list(zip(_spans(S), parts, strict=True))[::-1]
    for some in _blocks(N, M * S * S):
        v_dS = v_NSd[some].float().transpose(1, 2)
        for (start, stop), p_all in spans:
            p = p_all[some]
            grad, q = (t[some, :, start:stop].flatten(1, 2) for t in (grad_NMSd, q_NMSd))
            # d scores = p (d p - sum(p d p)) / sqrt(d); the factor is cheapest here
            d_p = torch.bmm(grad.float() * d**-0.5, v_dS[..., :stop])
            d_scores = torch._softmax_backward_data(d_p, p.float(), -1, d_p.dtype).to(p.dtype)
            d_q[some, :, start:stop] = torch.bmm(d_scores, k_NSd[some, :stop]).unflatten(1, (M, -1))
            for total, rows, factor in ((d_v, p, grad), (d_k, d_scores, q)):
                found = torch.bmm(rows.transpose(1, 2), factor)
                if stop == S:
                    total[some] = found
                else:
                    total[some, :stop] += found
    h = ctx.num_key_heads
    return d_q.view(B, H, S, d), d_k.view(B, h, S, d), d_v.view(B, h, S, d)
