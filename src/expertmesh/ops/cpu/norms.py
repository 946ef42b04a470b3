"""RMSNorm and rotary positions on a CPU, a block of rows at a time.

Plain operators would pass over the whole tensor six to ten times, each time from memory if it exceeds the cache. Here a
block stays in the L2 cache through all passes, and the backward recomputes intermediates from the input. Formulas and
precision are the same (FP32, or FP64 for FP64 input).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.ops.dtypes import accumulate_dtype, without_autocast

# 256 KiB in FP32: with two temporaries, less than a core's L2 cache
_BLOCK_ELEMENTS = 1 << 16


def serves(x: Tensor) -> bool:
    """Whether the functions of this module are the fastest choice: on a CPU, unless a compiler fuses the passes."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis; differentiable once.

    Args:
        x: (..., dim) on the CPU.
        weight: (dim,).
    """
    flat = x.reshape(-1, x.shape[-1])
    y: Tensor = _RMSNorm.apply(flat, weight, eps)
    return y.view(x.shape)


def norm_and_rope(x_BSHd: Tensor, weight: Tensor | None, *, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RMSNorm over each head, if there is a weight, then the rotation of `models.layers.apply_rope`;
    differentiable once.

    Args:
        x_BSHd: (B, S, H, head_dim) queries or keys on the CPU, any strides.
        weight: (head_dim,), or None: no norm.
        cos: (S, head_dim / 2).
        sin: (S, head_dim / 2).

    Returns:
        (B, S, H, head_dim) in the dtype of x, contiguous.
    """
    y: Tensor = _NormRope.apply(x_BSHd, weight, eps, cos, sin)
    return y


def _blocks(length: int, row_elements: int) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // max(row_elements, 1))
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _inverse_rms(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, grad_weight: Tensor) -> Tensor:
    """Gradient of x from the gradient of y = x * scale * weight; adds to grad_weight.

    With n = x scale: dx = scale (g w - n mean(g w n)), dw = sum(g n).
    """
    normed = x * scale
    product = grad * normed
    grad_weight += product.flatten(0, -2).sum(0)
    with without_autocast(x.device):
        mean = (product @ weight).div_(-x.shape[-1])
    return (grad * weight).addcmul_(normed, mean[..., None]).mul_(scale)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = accumulate_dtype(x_TD.dtype)
        y_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        scale_T = _inverse_rms(x_TD, eps, dtype)
        wide = weight.to(dtype)
        for rows in _blocks(*x_TD.shape):
            if x_TD.dtype == dtype:
                torch.mul(x_TD[rows], scale_T[rows], out=y_TD[rows]).mul_(wide)
            else:
                y_TD[rows] = (x_TD[rows] * scale_T[rows]).mul_(wide)
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
            x, grad = x_TD[rows].to(dtype), grad_TD[rows].to(dtype)
            out_TD[rows] = _norm_backward(grad, x, scale_T[rows], wide, grad_weight)
        return out_TD, grad_weight.to(weight.dtype), None


def _whole_tables(cos: Tensor, sin: Tensor, num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables (S, H, head_dim) for whole rows: products of contiguous rows are several times as fast as products of half
    rows."""
    S, half = cos.shape

    def whole(first: Tensor, second: Tensor) -> Tensor:
        table = torch.cat((first, second), dim=-1).to(dtype)
        return table[:, None].expand(S, num_heads, 2 * half).contiguous()

    return whole(cos, cos), whole(-sin, sin)


def _rotate(x_BSHd: Tensor, cos_SHd: Tensor, sin_SHd: Tensor) -> Tensor:
    """Rotation (x1 cos - x2 sin, x2 cos + x1 sin) of x = (x1, x2), with tables of `_whole_tables`."""
    first, second = x_BSHd.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x_BSHd * cos_SHd).addcmul_(swapped, sin_SHd)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHd: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        dtype = accumulate_dtype(x_BSHd.dtype)
        B, S, H, d = x_BSHd.shape
        y_BSHd = x_BSHd.new_empty(B, S, H, d)
        scale_BSH = None if weight is None else _inverse_rms(x_BSHd, eps, dtype)
        wide = None if weight is None else weight.to(dtype)
        cos_SHd, sin_SHd = _whole_tables(cos, sin, H, dtype)
        for rows in _blocks(B, S * H * d):
            x = x_BSHd[rows].to(dtype)
            if wide is not None and scale_BSH is not None:
                x = (x * scale_BSH[rows]).mul_(wide)
            y_BSHd[rows] = _rotate(x, cos_SHd, sin_SHd)
        ctx.save_for_backward(x_BSHd if weight is not None else None, weight, scale_BSH, cos, sin)
        return y_BSHd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHd: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x_BSHd, weight, scale_BSH, cos, sin = ctx.saved_tensors
        dtype = accumulate_dtype(grad_BSHd.dtype)
        B, S, H, d = grad_BSHd.shape
        out_BSHd = grad_BSHd.new_empty(B, S, H, d)
        cos_SHd, sin_SHd = _whole_tables(cos, -sin, H, dtype)
        wide = None if weight is None else weight.to(dtype)
        grad_weight = None if wide is None else torch.zeros_like(wide)
        for rows in _blocks(B, S * H * d):
            grad = _rotate(grad_BSHd[rows].to(dtype), cos_SHd, sin_SHd)
            if wide is not None and grad_weight is not None:
                x = x_BSHd[rows].to(dtype)
                grad = _norm_backward(grad, x, scale_BSH[rows], wide, grad_weight)
            out_BSHd[rows] = grad
        weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return out_BSHd, weight_grad, None, None, None
