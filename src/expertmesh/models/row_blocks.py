"""RMSNorm and rotary positions on a CPU, a block of rows at a time.

Written with plain operators each of them passes over a whole tensor six to ten times, and what is larger than the cache
comes from memory each time. Here a block stays in the second-level cache through all passes, and the backward pass
computes again what it needs from the input. Same formulas, same precision (FP32, or FP64 for FP64 input).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# 256 KiB in FP32: with two temporaries, less than the second-level cache of a core.
_BLOCK_ELEMENTS = 1 << 16


def serves(x: Tensor) -> bool:
    """Whether the functions of this module are the way to go: on a CPU, unless a compiler will fuse the passes."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis; differentiable once.

    Args:
        x: (..., dim) on the CPU.
        weight: (dim,).
        eps: added to the mean square.

    Returns:
        Like x, in its dtype.
    """
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _RMSNorm.apply(flat, weight, eps)
    return y.view(x.shape)


def norm_and_rope(
    x_BSHd: Tensor, weight: Tensor | None, *, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """RMSNorm over each head, if there is a weight, then the rotation of `layers.apply_rope`; differentiable once.

    Args:
        x_BSHd: (B, S, H, head_dim) queries or keys on the CPU, any strides.
        weight: (head_dim,), or None: no norm.
        eps: of the norm.
        cos: (S, head_dim / 2).
        sin: like cos.

    Returns:
        (B, S, H, head_dim) in the dtype of x, contiguous.
    """
    y: Tensor = _NormRope.apply(x_BSHd, weight, eps, cos, sin)
    return y


def _blocks(length: int, row_elements: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // max(row_elements, 1))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, grad_weight: Tensor
) -> Tensor:
    """Gradient of x from that of y = x * scale * weight; adds to grad_weight. Overwrites grad and x.

    With n = x scale: dx = scale (g w - n mean(g w n)), dw = sum(g n).
    """
    normed = x.mul_(scale)
    product = grad * normed
    grad_weight += product.flatten(0, -2).sum(0)
    mean = product.mul_(weight).mean(-1, keepdim=True)
    return grad.mul_(weight).sub_(normed.mul_(mean)).mul_(scale)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        scale_T = torch.empty(len(x_TD), 1, dtype=dtype)
        wide = weight.to(dtype)
        for rows in _blocks(*x_TD.shape):
            x = x_TD[rows].to(dtype)
            scale = _inverse_rms(x, eps)
            scale_T[rows] = scale
            y_TD[rows] = (x * scale).mul_(wide)
        ctx.save_for_backward(x_TD, weight, scale_T)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight, scale_T = ctx.saved_tensors
        dtype = scale_T.dtype
        wide = weight.to(dtype)
        grad_weight = torch.zeros_like(wide)
        out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        for rows in _blocks(*x_TD.shape):
            x, grad = x_TD[rows].to(dtype, copy=True), grad_TD[rows].to(dtype, copy=True)
            out_TD[rows] = _norm_backward(grad, x, scale_T[rows], wide, grad_weight)
        return out_TD, grad_weight.to(weight.dtype), None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHd: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(x_BSHd.dtype, torch.float32)
        B, S, H, d = x_BSHd.shape
        y_BSHd = torch.empty(B, S, H, d, dtype=x_BSHd.dtype)
        scale_BSH = torch.empty(B, S, H, 1, dtype=dtype) if weight is not None else None
        cos_S1, sin_S1 = cos[:, None], sin[:, None]
        for rows in _blocks(B, S * H * d):
            x = x_BSHd[rows].to(dtype, copy=True)
            if weight is not None and scale_BSH is not None:
                scale = _inverse_rms(x, eps)
                scale_BSH[rows] = scale
                x.mul_(scale).mul_(weight.to(dtype))
            first, second = x.chunk(2, dim=-1)
            y = y_BSHd[rows]
            y[..., : d // 2] = (first * cos_S1).sub_(second * sin_S1)
            y[..., d // 2 :] = (second * cos_S1).add_(first * sin_S1)
        ctx.save_for_backward(x_BSHd if weight is not None else None, weight, scale_BSH, cos, sin)
        return y_BSHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHd: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x_BSHd, weight, scale_BSH, cos, sin = ctx.saved_tensors
        dtype = torch.promote_types(grad_BSHd.dtype, torch.float32)
        B, S, H, d = grad_BSHd.shape
        out_BSHd = torch.empty(B, S, H, d, dtype=grad_BSHd.dtype)
        cos_S1, sin_S1 = cos[:, None], sin[:, None]
        wide = None if weight is None else weight.to(dtype)
        grad_weight = None if wide is None else torch.zeros_like(wide)
        for rows in _blocks(B, S * H * d):
            first, second = grad_BSHd[rows].to(dtype).chunk(2, dim=-1)
            grad = torch.empty(first.shape[0], S, H, d, dtype=dtype)
            grad[..., : d // 2] = (first * cos_S1).add_(second * sin_S1)
            grad[..., d // 2 :] = (second * cos_S1).sub_(first * sin_S1)
            if wide is not None and grad_weight is not None:
                x = x_BSHd[rows].to(dtype, copy=True)
                grad = _norm_backward(grad, x, scale_BSH[rows], wide, grad_weight)
            out_BSHd[rows] = grad
        weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return out_BSHd, weight_grad, None, None, None
