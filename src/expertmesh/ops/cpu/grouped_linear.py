"""Torch backend of `grouped_linear`: one product per expert over its block of sorted rows. Nothing here is seen by
autograd."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import grouped_mm

from expertmesh.errors import ConfigError
from expertmesh.ops.cpu.expert_rows import rows_by_expert
from expertmesh.ops.cpu.products import (
    grouped_mm_serves,
    linear_into,
    product_into,
)
from expertmesh.ops.dtypes import accumulate_dtype, gemm_dtype

_FEW_ROWS = 64


def forward(x_RK: Tensor, w: Tensor, offsets_E: Tensor, b_EN: Tensor | None, *, transposed: bool) -> Tensor:
    """Compute (R, N), zeros behind the last live row; see `expertmesh.ops.experts.grouped_linear`."""
    bounds = offsets_E.tolist()
    _check_bounds(bounds, x_RK.shape[0])
    dtype = gemm_dtype(x_RK.device, x_RK.dtype)
    w_ENK = w.mT if transposed else w
    live = bounds[-1]
    if _in_one_call(w_ENK, bounds, b_EN, dtype):
        y = grouped_mm(x_RK[:live].contiguous(), w_ENK.mT, offs=offsets_E[1:])
        return y if live == x_RK.shape[0] else F.pad(y, (0, 0, 0, x_RK.shape[0] - live))
    x = x_RK.to(dtype)
    y = x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1], dtype=dtype)
    for block in rows_by_expert(bounds, w, dtype):
        x_e, y_e, w_NK = block.each(x), block.room(y), w_ENK[block.expert].to(dtype)
        if b_EN is not None:
            linear_into(x_e, w_NK, y_e, bias_N=b_EN[block.expert].to(dtype))
        else:
            product_into(x_e, w_NK.T, y_e)
        block.keep(y_e, y)
    y[live:].zero_()
    return y.to(x_RK.dtype)


def weight_grad(grad_RN: Tensor, x_RK: Tensor, w: Tensor, offsets_E: Tensor, *, transposed: bool) -> Tensor:
    """Compute the gradient of the weights, contiguous; zeros for experts without rows."""
    bounds = offsets_E.tolist()
    dtype = gemm_dtype(x_RK.device, x_RK.dtype)
    rows = (x_RK, grad_RN) if transposed else (grad_RN, x_RK)
    left, right = (t.to(dtype) for t in rows)
    found = x_RK.new_empty(w.shape, dtype=dtype)
    for block in rows_by_expert(bounds, w, dtype):
        product_into(block.alone(left).T, block.alone(right), found[block.expert])
    _zero_empty(found, bounds)
    return found.to(x_RK.dtype)


def bias_grad(grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Compute the gradient of the biases (E, N)."""
    bounds = offsets_E.tolist()
    found = grad_RN.new_empty(len(bounds) - 1, grad_RN.shape[1])
    wide = accumulate_dtype(grad_RN.dtype)
    for e, (start, stop) in enumerate(pairwise(bounds)):
        found[e] = grad_RN[start:stop].sum(0, dtype=wide)
    return found


def _check_bounds(bounds: list[int], num_rows: int) -> None:
    if bounds[0] == 0 and all(a <= b for a, b in pairwise([*bounds, num_rows])):
        return
    wrong = next((f"{b} behind {a}" for a, b in pairwise([0, *bounds]) if b < a), None)
    if wrong is None:
        wrong = str(bounds[-1] if bounds[-1] > num_rows else bounds[0])
    raise ConfigError(
        f"offsets hold {wrong}; they must be 0, then rise to at most the {num_rows} rows; give the metadata's offsets_E"
    )


def _in_one_call(w_ENK: Tensor, bounds: list[int], b_EN: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether PyTorch's grouped product is the fastest choice: few rows, each weight read once."""
    counts = [stop - start for start, stop in pairwise(bounds)]
    num_live = sum(count > 0 for count in counts)
    return b_EN is None and dtype == w_ENK.dtype and 0 < max(counts) < _FEW_ROWS and grouped_mm_serves(w_ENK, num_live)


def _zero_empty(values_E: Tensor, bounds: list[int]) -> None:
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            values_E[e].zero_()
