"""Grouped products of rows with experts' matrices in 8 and 4 bits, which are widened in registers.

A program computes BLOCK_M rows of one expert by BLOCK_N columns. Numbers of 8 and 4 bits are exact in BF16, so they are
multiplied unscaled, and the scale of a group, a row or a block multiplies the FP32 sum: only the sums round. Weights
are read once per tile of rows. FP8 is read as bytes and widened by shifts, because GPUs before Hopper, and AMD's CDNA
3, have no instruction for this format. Tile sizes depend on shapes only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.grouped import Rows
from expertmesh.kernels.launch import launch

INT8, INT4, FP8 = range(3)
FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8}
"""Format codes of the kernel by name."""
FP8_BLOCK = 128
"""Rows and columns of an FP8 block."""


@triton.jit
def _fp8_as_float(bits):
    """Convert e4m3 bytes to FP32: the exponent's bias is 7; exponent 0 means multiples of 2^-9."""
    b = bits.to(tl.int32)
    exponent, mantissa = (b >> 3) & 15, b & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(b > 127, -value, value)


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_product(
    x_ptr,
    token_of_row_ptr,
    w_ptr,
    scales_ptr,
    out_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    num_rows,
    N,
    K,
    F,
    num_groups,
    FORMAT: tl.constexpr,
    GATHER: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute out[row, n] = sum over k of x[row, k] W[e, n, k] with scaled numbers of W; FP8 blocks start anew every F
    rows."""
    m = tl.program_id(0)
    if m >= tl.load(num_tiles_ptr):
        return
    e = tl.load(tile_expert_ptr + m).to(tl.int64)
    row = tl.load(tile_row_ptr + m) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(offsets_ptr + e + 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = n < N
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(token_of_row_ptr + source, mask=is_row, other=0).to(tl.int64)
    x_rows = x_ptr + source[:, None] * K
    BYTES: tl.constexpr = BLOCK_K // 2 if FORMAT == 1 else BLOCK_K
    num_bytes = K // 2 if FORMAT == 1 else K
    w_rows = w_ptr + (e * N + n)[:, None] * num_bytes
    if FORMAT == 2:
        blocks = (F + 127) // 128
        scale_row = (e * (N // F) + n // F) * blocks + n % F // 128
    else:
        scale_row = e * N + n
    scales = scales_ptr + scale_row * num_groups
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        byte = first * BYTES // BLOCK_K + tl.arange(0, BYTES)
        is_byte = byte < num_bytes
        w = tl.load(w_rows + byte[None, :], mask=is_column[:, None] & is_byte[None, :], other=0)
        mask = is_row[:, None] & is_byte[None, :]
        if FORMAT == 1:
            even = tl.load(x_rows + 2 * byte[None, :], mask=mask, other=0.0)
            odd = tl.load(x_rows + 2 * byte[None, :] + 1, mask=mask, other=0.0)
            low = ((w & 15).to(tl.int32) - 8).to(dtype)
            high = ((w >> 4).to(tl.int32) - 8).to(dtype)
            part = tl.dot(even, tl.trans(low), input_precision=PRECISION)
            part = tl.dot(odd, tl.trans(high), part, input_precision=PRECISION)
        else:
            x = tl.load(x_rows + byte[None, :], mask=mask, other=0.0)
            wide = _fp8_as_float(w).to(dtype) if FORMAT == 2 else w.to(tl.float32).to(dtype)
            part = tl.dot(x, tl.trans(wide), input_precision=PRECISION)
        group = first * num_groups // K if FORMAT == 1 else (first // 128 if FORMAT == 2 else 0)
        scale = tl.load(scales + group, mask=is_column, other=0.0).to(tl.float32)
        total += part * scale[None, :]
    out = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def block_of(format: str, K: int, num_groups: int, rows_per_expert: int) -> dict[str, Any]:
    """Tile sizes of a launch, from shapes only. `format`: int8, int4 or fp8."""
    rows = 16 if rows_per_expert <= 16 else 32 if rows_per_expert <= 32 else 64
    columns = min(64, K // num_groups) if format == "int4" else 64
    warps = 8 if rows == 64 else 4
    return {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": columns, "num_warps": warps}


def grouped_product(
    x: Tensor,  # (R, K) rows, or (T, K) tokens if `gather`; contiguous, BF16, FP16 or FP32
    w_ENK: Tensor,  # (E, N, K) int8 or float8_e4m3fn, or (E, N, K / 2) uint8 of int4; contiguous
    scales: Tensor,  # (E, N, groups), for FP8 (E, branches, blocks of rows, blocks of columns); contiguous
    rows: Rows,  # sorted rows, cut into tiles of block["BLOCK_M"]
    *,
    format: str,  # int8, int4 or fp8
    gather: bool,  # whether x holds tokens
    rows_per_branch: int,  # rows of W per branch, after which FP8 blocks start anew
    block: dict[str, Any],  # result of `block_of`
) -> Tensor:
    """Multiply sorted rows by the transposed matrix of their expert.

    Returns:
        (R, N) in FP32; rows behind the last expert's are not written.
    """
    N, K = w_ENK.shape[1], x.shape[1]
    out = x.new_empty(rows.num_rows, N, dtype=torch.float32)
    if w_ENK.dtype == torch.float8_e4m3fn:
        w_ENK = w_ENK.view(torch.uint8)
    launch(
        _quantized_product,
        (rows.most_tiles, triton.cdiv(N, block["BLOCK_N"])),
        x,
        rows.token_of_row_N,
        w_ENK,
        scales,
        out,
        rows.offsets_E,
        rows.tile_expert,
        rows.tile_row,
        rows.num_tiles,
        rows.num_rows,
        N,
        K,
        rows_per_branch,
        scales.shape[-1],
        FORMAT=FORMATS[format],
        GATHER=gather,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **block,
    )
    return out
