"""Sum of each token's rows in FP32: bandwidth-bound, deterministic.

A program takes a few tokens and a block of columns, and reads the K rows of every token in place. Rows are not copied
to token order first, and there are no atomics. Elements moved: N * D live rows and T * D outputs, once each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import launch, next_power_of_2

_PROGRAM_BYTES = 4096  # 128 threads with two 16-byte loads each
_FEW_PROGRAMS = 256  # with fewer programs, smaller blocks keep more multiprocessors busy (decoding)
_SMALL_BLOCK_D = 256
_MOST_BLOCK_D = 1024
_MOST_UNROLLED = 8


def row_tile(num_rows: int, dim: int, itemsize: int) -> tuple[int, int]:
    """Block (rows, columns) of one program of a row-moving kernel, from shapes only."""
    columns = min(next_power_of_2(dim), _MOST_BLOCK_D)
    rows = max(_PROGRAM_BYTES // (itemsize * columns), 1)
    if triton.cdiv(num_rows, rows) * triton.cdiv(dim, columns) < _FEW_PROGRAMS:
        return 1, min(columns, _SMALL_BLOCK_D)
    return rows, columns


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Triton's accumulation dtype: FP64 for FP64, FP32 for the rest."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit(do_not_specialize=["bound", "num_tokens"])
def _sum_rows(
    y_ptr,
    bound,
    row_of_slot_ptr,
    out_ptr,
    num_tokens,
    D,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    BOUND_ON_DEVICE: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute out[t] = sum over j of y[row_of_slot[t, j]] over rows below the bound, in the order of j."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = t < num_tokens
    num_live = tl.load(bound) if BOUND_ON_DEVICE else bound
    total = tl.zeros((BLOCK_T, BLOCK_D), ACCUMULATOR)
    for j in tl.range(0, K, loop_unroll_factor=UNROLL):
        row = tl.load(row_of_slot_ptr + t * K + j, mask=real, other=0)
        live = real & (row < num_live)
        mask = live[:, None] & (d < D)[None, :]
        y = tl.load(y_ptr + row.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
        y = y.to(ACCUMULATOR)
        total = y if K == 1 else total + y
    mask = real[:, None] & (d < D)[None, :]
    tl.store(out_ptr + t[:, None] * D + d[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_rows(y_RD: Tensor, bound: Tensor | int, row_of_slot_N: Tensor, top_k: int) -> Tensor:
    """Sum each token's live rows.

    Args:
        y_RD: (R, D) rows of any floating-point dtype. Rows from the bound on may hold anything.
        bound: number of live rows, an int or a tensor of one int32 on the device.
        row_of_slot_N: (T * K,) int32; slots whose row is not below the bound are left out.

    Returns:
        (T, D) in the dtype of y, summed in FP32 (FP64 for FP64) in the order of j. Does not synchronise.
    """
    num_tokens, dim = row_of_slot_N.shape[0] // top_k, y_RD.shape[1]
    out = torch.empty(num_tokens, dim, dtype=y_RD.dtype, device=y_RD.device)
    block_t, block_d = row_tile(num_tokens, dim, y_RD.element_size())
    launch(
        _sum_rows,
        (triton.cdiv(num_tokens, block_t), triton.cdiv(dim, block_d)),
        y_RD.contiguous(),
        bound,
        row_of_slot_N,
        out,
        num_tokens,
        dim,
        K=top_k,
        UNROLL=min(top_k, _MOST_UNROLLED),
        BOUND_ON_DEVICE=isinstance(bound, Tensor),
        ACCUMULATOR=accumulator(y_RD.dtype),
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out
