"""Copies of rows between token order, slot order and expert order; every output element is written once.

`tokens_to_rows` runs over tokens, not over rows: a token is read once and written K times, (1 + K) * T * D elements. A
gather by row would read up to K * T * D elements if the tokens do not fit the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.combine import row_tile, sum_rows
from expertmesh.kernels.launch import launch


@triton.jit(do_not_specialize=["bound", "num_tokens", "num_rows"])
def _spread_rows(
    x_ptr,
    bound,
    row_of_slot_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    D,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute out[row_of_slot[t, j]] = x[t] for live rows, and 0 for dead rows below num_rows."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = t < num_tokens
    columns = (d < D)[None, :]
    num_live = tl.load(bound)
    x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=real[:, None] & columns, other=0.0)
    for j in range(K):
        row = tl.load(row_of_slot_ptr + t * K + j, mask=real, other=0)
        live = real & (row < num_live)
        # where, not a product with 0, because a dead slot's token may be NaN
        value = tl.where(live[:, None], x, 0.0)
        mask = (real & (row < num_rows))[:, None] & columns
        tl.store(out_ptr + row.to(tl.int64)[:, None] * D + d[None, :], value, mask=mask)


def tokens_to_rows(x_TD: Tensor, offsets_E: Tensor, row_of_slot_N: Tensor, num_rows: int) -> Tensor:
    """Copy tokens (T, D) to rows in expert order (R, D), zeros behind the live rows.

    Args:
        x_TD: (T, D), any floating-point dtype.
        offsets_E: (E + 1,) int32; its last element is the number of live rows.
        row_of_slot_N: (T * K,) int32, a permutation.
        num_rows: R, at most T * K.

    Returns:
        (R, D) in the dtype of x. Does not synchronise.
    """
    num_tokens, dim = x_TD.shape
    out = torch.empty(num_rows, dim, dtype=x_TD.dtype, device=x_TD.device)
    block_t, block_d = row_tile(num_tokens, dim, x_TD.element_size())
    launch(
        _spread_rows,
        (triton.cdiv(num_tokens, block_t), triton.cdiv(dim, block_d)),
        x_TD.contiguous(),
        offsets_E[-1:],
        row_of_slot_N,
        out,
        num_tokens,
        num_rows,
        dim,
        K=row_of_slot_N.shape[0] // max(num_tokens, 1),
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out


def rows_to_slots(y_RD: Tensor, offsets_E: Tensor, row_of_slot_N: Tensor) -> Tensor:
    """Copy rows (R, D) to slots (N, D), with zeros for dead slots. Does not synchronise."""
    return sum_rows(y_RD, offsets_E[-1:], row_of_slot_N, 1)
