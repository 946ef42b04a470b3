"""Products of rows with their experts' matrices and low-rank adapters on a CPU, one expert at a time while its rows are in the cache.

Nothing here is seen by autograd. Adapters are thin, so what counts is the way to each product: no expert's rows are copied or
padded, no sum is a pass of its own.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from expertmesh.ops.cpu.forward import rows_times_weight
from expertmesh.ops.cpu.products import gemm_rows, product_into


def forward(
    x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor, a_ErK: Tensor, b_ENr: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Give y (R, N) = x W^T + s (x A^T) B^T and s x A^T (R, r); zeros behind the last live row.

    All of one type, whose products this CPU has.
    """
    bounds = offsets_E.tolist()
    a_ErK, b_ENr = a_ErK.contiguous(), b_ENr.contiguous()  # once, and not in each product
    y_RN = x_RK.new_empty(x_RK.shape[0], w_ENK.shape[1])
    low_Rr = x_RK.new_empty(x_RK.shape[0], a_ErK.shape[1])
    for e, rows, whole in _blocks(bounds, x_RK):
        x, y, low = (_taken(t, rows, whole) for t in (x_RK, y_RN, low_Rr))
        rows_times_weight(x, w_ENK[e], y)
        product_into(x, a_ErK[e].T, low)
        low.mul_(scaling)
        product_into(low, b_ENr[e].T, y, add=True)
        if not whole:
            y_RN[rows], low_Rr[rows] = y[: len(y_RN[rows])], low[: len(y_RN[rows])]
    y_RN[bounds[-1] :].zero_()
    low_Rr[bounds[-1] :].zero_()
    return y_RN, low_Rr


def backward(
    grad_RN: Tensor,
    x_RK: Tensor,
    low_Rr: Tensor,
    w_ENK: Tensor,
    offsets_E: Tensor,
    a_ErK: Tensor,
    b_ENr: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of x (R, K), a (E, r, K) and b (E, N, r)."""
    bounds = offsets_E.tolist()
    d_x = torch.empty_like(x_RK)
    a_ErK, b_ENr = a_ErK.contiguous(), b_ENr.contiguous()
    d_a, d_b = x_RK.new_zeros(a_ErK.shape), x_RK.new_zeros(b_ENr.shape)
    for e, rows, whole in _blocks(bounds, x_RK):
        grad, x, dx = (_taken(t, rows, whole) for t in (grad_RN, x_RK, d_x))
        count, size = bounds[e + 1] - bounds[e], grad.shape[0]
        # rows of other experts in the block count in no sum, because they are zero in the thin factor of each
        low = low_Rr.new_zeros(size, low_Rr.shape[1])
        low[:count] = low_Rr[bounds[e] : bounds[e + 1]]
        d_low = torch.empty_like(low)
        product_into(grad, b_ENr[e], d_low)
        d_low.mul_(scaling)
        d_low[count:].zero_()
        product_into(grad, w_ENK[e], dx)
        product_into(d_low, a_ErK[e], dx, add=True)
        product_into(d_low.T, x, d_a[e])
        product_into(grad.T, low, d_b[e])
        if not whole:
            d_x[rows] = dx[:count]
    d_x[bounds[-1] :].zero_()
    return d_x, d_a, d_b


def _blocks(bounds: list[int], x_RK: Tensor) -> Iterator[tuple[int, slice, bool]]:
    """Experts with rows, the rows to multiply (`gemm_rows` of them), and whether all of these are live.

    A block reaches into the rows of later experts, whose results are written after its own.
    """
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            end = start + gemm_rows(stop - start, x_RK.device, x_RK.dtype)
            is_whole = end <= bounds[-1]
            yield e, slice(start, end if is_whole else stop), is_whole


def _taken(rows_R: Tensor, rows: slice, whole: bool) -> Tensor:
    """The block, or a copy of it with zeros behind where it would end behind the last live row."""
    part = rows_R[rows]
    if whole:
        return part
    size = gemm_rows(len(part), part.device, part.dtype)
    padded = part.new_zeros(size, part.shape[1])
    padded[: len(part)] = part
    return padded
