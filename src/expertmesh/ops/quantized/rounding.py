"""Rounding of matrices to 8 and 4 bits, with the scales that leave the least squared error.

Formats: int8 with a scale per row ("channel"), int4 with a scale per group of a row's columns, FP8 (e4m3) with a scale
per block of 128 by 128. Zero stays zero in all of them. Scales are rounded to their dtype first, and numbers are then
rounded for the stored scale, so that no error is made twice.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Format = Literal["int8", "int4", "fp8"]
FORMATS: tuple[Format, ...] = ("int8", "int4", "fp8")
"""Formats that a matrix can be rounded to."""
BLOCK = 128
"""Rows and columns of an FP8 block."""
GROUP_SIZES = (32, 64, 128)
"""Allowed numbers of columns of an int4 group."""
_SHARES = {
    8: (1.0, 0.99, 0.98, 0.96, 0.94, 0.92),
    4: (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7, 0.65, 0.6),
}
"""Candidate scales, relative to the scale that fits the largest number: smaller ones clip it, and round all others more
finely."""
_DAMPING = 0.01
"""Fraction of the mean square added to all columns, so that columns with tiny inputs stay near their values."""
_FP8_LARGEST = 448.0
_FP8_STEPS = 8
"""Number of candidate scales for FP8 within a factor of two; beyond it numbers round the same way."""


class Rounded(NamedTuple):
    """A rounded matrix, or a stack of rounded matrices."""

    values: Tensor  # (..., N, K), int8 in [-128, 127] or in [-8, 7], or float8_e4m3fn
    # (..., N, 1), (..., N, K / g), or (..., N / 128, K / 128) rounded up; a number is its value times its scale
    scales: Tensor


def rounded(
    w: Tensor,  # (N, K), of any floating-point type
    to: Format,
    *,
    group_size: int,  # columns per scale of int4; must divide K
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> Rounded:
    """Round a matrix.

    Args:
        importance: for int8 and int4: (K,) weight of a column's squared error; or (K, K) mean products of the input
            columns, with which later columns compensate the error of earlier ones (GPTQ). None: equal weights.
    """
    wide = w.detach().float()
    if to == "fp8":
        return _fp8(wide, scale_dtype)
    bits, size = (8, w.shape[-1]) if to == "int8" else (4, group_size)
    if importance is not None and importance.dim() == 2:
        return _made_up(wide, bits, size, scale_dtype, importance.float())
    parts = wide.unflatten(-1, (-1, size))
    counts = None if importance is None else importance.float().view(-1, size)
    scales, values = _least_squares(parts, bits, scale_dtype, counts)
    return Rounded(values.flatten(-2), scales.squeeze(-1))


def _least_squares(w: Tensor, bits: int, scale_dtype: torch.dtype, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales (..., 1) and rounded values of groups along the last dimension."""
    most = 2 ** (bits - 1)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    fitting = w.abs().amax(-1, keepdim=True) / (most - 1)
    for share in _SHARES[bits]:
        scale = _stored(fitting * share, scale_dtype)
        q = (w / scale).round_().clamp_(-most, most - 1)
        # the best scale for these values, then the values for that scale
        weighted = q if importance is None else q * importance
        scale = _stored((weighted * w).sum(-1, keepdim=True) / (weighted * q).sum(-1, keepdim=True), scale_dtype)
        q = (w / scale).round_().clamp_(-most, most - 1)
        off = (w - q * scale).square_()
        error = (off if importance is None else off.mul_(importance)).sum(-1, keepdim=True)
        if best is None:
            best = error, scale, q
            continue
        is_better = error < best[0]
        best = (
            torch.where(is_better, error, best[0]),
            torch.where(is_better, scale, best[1]),
            torch.where(is_better, q, best[2]),
        )
    assert best is not None
    return best[1].to(scale_dtype), best[2].to(torch.int8)


def _made_up(w: Tensor, bits: int, size: int, scale_dtype: torch.dtype, products_KK: Tensor) -> Rounded:
    """Round column by column, and adjust later columns so that outputs change least (GPTQ, Frantar et al. 2022, arXiv
    2210.17323, alg. 1).

    Scales of a group are chosen when its turn comes, for the adjusted columns.
    """
    K, most = w.shape[-1], 2 ** (bits - 1)
    mean = products_KK.diagonal().mean().clamp_min(1e-12)
    factor_KK = _factor(products_KK.double(), float(mean))
    w, importance_K = w.clone(), products_KK.diagonal() + _DAMPING * mean
    values, scales = torch.empty_like(w, dtype=torch.int8), []
    for start in range(0, K, size):
        stop = start + size
        part, counts = w[:, start:stop], importance_K[start:stop]
        scale, _ = _least_squares(part, bits, scale_dtype, counts)
        scales.append(scale)
        wide, left = scale[:, 0].float(), torch.empty_like(part)
        for k in range(start, stop):
            q = (w[:, k] / wide).round().clamp_(-most, most - 1)
            values[:, k] = q.to(torch.int8)
            off = (w[:, k] - q * wide) / factor_KK[k, k]
            left[:, k - start] = off
            w[:, k:stop] -= off[:, None] * factor_KK[k, k:stop]
        w[:, stop:] -= left @ factor_KK[start:stop, stop:]
    return Rounded(values, torch.cat(scales, -1))


def _factor(products_KK: Tensor, mean: float) -> Tensor:
    """Upper Cholesky factor of the inverse, damped until it is positive definite in FP32 sums."""
    one_KK = torch.eye(products_KK.shape[0], dtype=products_KK.dtype)
    for damping in (_DAMPING, 10 * _DAMPING):
        lower_KK, problem = torch.linalg.cholesky_ex(products_KK + damping * mean * one_KK)
        if not int(problem):
            break
    else:  # the diagonal only: columns compensate nothing
        diagonal_K = products_KK.diagonal() + _DAMPING * mean
        return diagonal_K.rsqrt().diag().float()
    inverse_KK = torch.cholesky_inverse(lower_KK)
    return torch.linalg.cholesky(inverse_KK, upper=True).float()


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to their dtype and return them in FP32; 1 for all-zero groups."""
    kept = scale.to(dtype).float()
    return torch.where((kept > 0) & kept.isfinite(), kept, torch.ones_like(kept))


def _fp8(w: Tensor, scale_dtype: torch.dtype) -> Rounded:
    N, K = w.shape[-2:]
    padded = torch.nn.functional.pad(w, (0, -K % BLOCK, 0, -N % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-3, -2)
    fitting = blocks.abs().amax((-2, -1), keepdim=True) / _FP8_LARGEST
    best: tuple[Tensor, Tensor] | None = None
    for step in range(_FP8_STEPS):
        scale = _stored(fitting * 2 ** (step / _FP8_STEPS), scale_dtype)
        q = (blocks / scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
        error = (blocks - q.float() * scale).square_().sum((-2, -1), keepdim=True)
        if best is None:
            best = error, scale
            continue
        best = torch.minimum(error, best[0]), torch.where(error < best[0], scale, best[1])
    assert best is not None
    scale = best[1]
    q = (blocks / scale).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    values = q.transpose(-3, -2).flatten(-4, -3).flatten(-2)[..., :N, :K]
    return Rounded(values.to(torch.float8_e4m3fn), scale[..., 0, 0].to(scale_dtype))


def widened(found: Rounded, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantise a rounded matrix.

    Args:
        found: (..., N, K) with its scales.
        dtype: the dtype of the result; None: the scales' dtype. The product is rounded to the scales' dtype in either
            case.
    """
    values, scales = found
    N, K = values.shape[-2:]
    q = values.to(scales.dtype)
    if values.dtype == torch.float8_e4m3fn:
        spread = scales.repeat_interleave(BLOCK, -2)[..., :N, :].repeat_interleave(BLOCK, -1)
        wide = q * spread[..., :K]
    else:
        wide = (q.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
    return wide if dtype is None else wide.to(dtype)
