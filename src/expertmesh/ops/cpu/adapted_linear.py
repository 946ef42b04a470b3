"""Products of rows with their experts' matrices and low-rank adapters on a CPU, one expert at a time while its rows are in the cache.

Nothing here is seen by autograd. Adapters are thin, so what counts is the way to each product: no sum is a pass of its own.
"""

import torch
from torch import Tensor

from expertmesh.ops.cpu.blocks import blocks
from expertmesh.ops.cpu.forward import rows_times_weight
from expertmesh.ops.cpu.products import product_into


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
    for block in blocks(bounds, w_ENK, x_RK.dtype):
        e, x, y = block.expert, block.each(x_RK), block.room(y_RN)
        rows_times_weight(x, w_ENK[e], y)
        low = low_Rr.new_empty(block.size, low_Rr.shape[1])
        product_into(x, a_ErK[e].T, low)
        own = low[: block.stop - block.start].mul_(scaling)
        low[len(own) :].zero_()
        product_into(low, b_ENr[e].T, y, add=True)
        low_Rr[block.start : block.stop] = own
        block.keep(y, y_RN)
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
    needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of x (R, K), a (E, r, K) and b (E, N, r); that of x is empty where nobody needs it."""
    bounds = offsets_E.tolist()
    d_x = x_RK.new_empty(x_RK.shape if needs_x else 0)
    a_ErK, b_ENr = a_ErK.contiguous(), b_ENr.contiguous()
    d_a, d_b = x_RK.new_zeros(a_ErK.shape), x_RK.new_zeros(b_ENr.shape)
    for block in blocks(bounds, w_ENK, x_RK.dtype):
        e = block.expert
        grad, x, low = (block.alone(t) for t in (grad_RN, x_RK, low_Rr))
        d_low = torch.empty_like(low)
        product_into(grad, b_ENr[e], d_low)
        d_low.mul_(scaling)
        product_into(d_low.T, x, d_a[e])
        product_into(grad.T, low, d_b[e])
        if needs_x:
            dx = block.room(d_x)
            product_into(grad, w_ENK[e], dx)
            product_into(d_low, a_ErK[e], dx, add=True)
            block.keep(dx, d_x)
    if needs_x:
        d_x[bounds[-1] :].zero_()
    return d_x, d_a, d_b
