"""Causal attention over short sequences in BF16 on a CPU, as batched matrix products.

There PyTorch's fused attention takes two to four times as long, forward and backward, as the products that it consists of
(docs/log.md; in FP32 it is as fast). Here a few sequences at a time go through all steps, so that their scores stay in
the second-level cache; scores, softmax and their gradients are FP32, and the probabilities are kept for the backward
pass: B * H * S * S elements, little where S is small.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.costs.memory import SHORT_SEQUENCE

_BLOCK_ELEMENTS = 1 << 18


def serves(q_BHSd: Tensor, k_BGSd: Tensor) -> bool:
    """Whether `causal_attention` is the way to go: short sequences without earlier keys, on a CPU, nothing compiled.

    Up to SHORT_SEQUENCE tokens it was measured to be faster than `scaled_dot_product_attention`.
    """
    S = q_BHSd.shape[2]
    return (
        q_BHSd.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and q_BHSd.dtype == torch.bfloat16
        and 1 < S == k_BGSd.shape[2] <= SHORT_SEQUENCE
        and q_BHSd.numel() > 0
    )


def causal_attention(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d), each token over itself and those before it) v; differentiable once.

    Args:
        q_BHSd: (B, H, S, d) queries on the CPU, any floating-point type; products of rows are FP32 or in that type.
        k_BGSd: (B, G, S, d) keys; G divides H, and query head h looks at key head h // (H / G).
        v_BGSd: (B, G, S, d) values.

    Returns:
        (B, H, S, d) in the dtype of q.
    """
    y: Tensor = _CausalAttention.apply(q_BHSd, k_BGSd, v_BGSd)
    return y


def _blocks(num_sequences: int, elements_of_each: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // elements_of_each)
    return (slice(i, min(i + size, num_sequences)) for i in range(0, num_sequences, size))


class _CausalAttention(torch.autograd.Function):
    """The H / G query heads of a key head are rows of one product, so keys and values are not repeated: R = S H / G."""

    @staticmethod
    def forward(ctx: Any, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor) -> Tensor:
        (B, H, S, d), G = q_BHSd.shape, k_BGSd.shape[1]
        N, R = B * G, S * H // G
        q_NRd = q_BHSd.reshape(N, R, d)
        k_NSd, v_NSd = k_BGSd.reshape(N, S, d), v_BGSd.reshape(N, S, d)
        hidden_SS = torch.full((S, S), -math.inf).triu_(1)
        hidden_RS = hidden_SS.repeat(H // G, 1)
        p_NRS = q_NRd.new_empty(N, R, S)
        y_NRd = torch.empty_like(q_NRd)
        for some in _blocks(N, R * S):
            q, k = q_NRd[some].float(), k_NSd[some].float()
            scores = torch.baddbmm(hidden_RS, q, k.transpose(1, 2), alpha=d**-0.5)
            p_NRS[some] = torch.softmax(scores, dim=-1)
            torch.bmm(p_NRS[some], v_NSd[some], out=y_NRd[some])
        ctx.save_for_backward(q_NRd, k_NSd, v_NSd, p_NRS)
        ctx.num_key_heads = G
        return y_NRd.view(B, H, S, d)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHSd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_NRd, k_NSd, v_NSd, p_NRS = ctx.saved_tensors
        B, H, S, d = grad_BHSd.shape
        N, R, _ = q_NRd.shape
        grad_NRd = grad_BHSd.reshape(N, R, d)
        d_q, d_k, d_v = (torch.empty_like(t) for t in (q_NRd, k_NSd, v_NSd))
        for some in _blocks(N, R * S):
            grad, p = grad_NRd[some], p_NRS[some]
            wide = p.float()
            torch.bmm(p.transpose(1, 2), grad, out=d_v[some])
            d_p = torch.bmm(grad.float(), v_NSd[some].float().transpose(1, 2))
            # d scores = p (d p - sum(p d p))
            mean = torch.linalg.vecdot(wide, d_p)[..., None]
            d_scores = d_p.sub_(mean).mul_(wide).mul_(d**-0.5).to(grad.dtype)
            torch.bmm(d_scores, k_NSd[some], out=d_q[some])
            torch.bmm(d_scores.transpose(1, 2), q_NRd[some], out=d_k[some])
        G = ctx.num_key_heads
        return d_q.view(B, H, S, d), d_k.view(B, G, S, d), d_v.view(B, G, S, d)
