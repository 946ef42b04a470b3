"""Grouped products of rows with experts' matrices in 8 and 4 bits, which are widened in registers, or in memory first.

A program computes BLOCK_M rows of one expert by BLOCK_N columns. Numbers of 8 and 4 bits are exact in BF16, so they are
multiplied unscaled, and the scale of a group, a row or a block multiplies the FP32 sum: only the sums round. NF4's
levels are not, and are scaled before they are rounded. Weights are read once per tile of rows. FP8 and FP4 are read as
bits and widened by shifts, because GPUs before Hopper (FP4: before Blackwell), and AMD's CDNA 3, have no instruction
for them. Tile sizes depend on shapes only.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.grouped import Rows
from expertmesh.kernels.launch import launch

FORMATS = {"int8": 0, "int4": 1, "fp8": 2, "mxfp4": 3, "nf4": 4}
"""Format codes of the kernels by name."""
FOUR_BITS = ("int4", "mxfp4", "nf4")
"""Formats with two numbers to a byte and scales of groups of columns."""
_WIDENED = 2048
"""Numbers that a program widens."""
_LEVELS = tl.constexpr(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)
"""Levels of NF4, as in `ops/quantized/nf4.py`."""


@triton.jit
def _fp8_as_float(bits):
    """Convert e4m3 bytes to FP32: the exponent's bias is 7; exponent 0 means multiples of 2^-9."""
    b = bits.to(tl.int32)
    exponent, mantissa = (b >> 3) & 15, b & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(b > 127, -value, value)


@triton.jit
def _number(code, FORMAT: tl.constexpr):
    """Convert bytes, or codes of four bits, to FP32 numbers without their scales."""
    if FORMAT == 1:
        return (code.to(tl.int32) - 8).to(tl.float32)
    if FORMAT == 2:
        return _fp8_as_float(code)
    if FORMAT == 3:
        b = code.to(tl.int32)  # e2m1: the exponent's bias is 1, and FP32's subnormals are its subnormals
        value = ((b & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
        return tl.where(b > 7, -value, value)
    if FORMAT == 4:
        value = tl.zeros(code.shape, tl.float32)
        for level in tl.static_range(16):
            value = tl.where(code == level, _LEVELS[level], value)
        return value
    return code.to(tl.float32)


@triton.jit
def _scale(raw, FORMAT: tl.constexpr):
    """Convert stored scales to FP32; MXFP4's are exponents plus 127."""
    if FORMAT == 3:
        bits = raw.to(tl.int32) << 23
        return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def _scale_row(e, n, N, F, FORMAT: tl.constexpr):
    """Compute the row of scales of row n of an expert's matrix; FP8 blocks start anew every F rows."""
    if FORMAT == 2:
        return (e * (N // F) + n // F) * ((F + 127) // 128) + n % F // 128
    return e * N + n


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_product(
    x_ptr,
    token_of_row_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    weights_ptr,
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
    """Compute out[row, n] = sum over k of x[row, k] W[e, n, k] with scaled numbers of W, plus the bias times the row's
    weight."""
    HALVES: tl.constexpr = FORMAT == 1 or FORMAT > 2
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
    BYTES: tl.constexpr = BLOCK_K // 2 if HALVES else BLOCK_K
    num_bytes = K // 2 if HALVES else K
    w_rows = w_ptr + (e * N + n)[:, None] * num_bytes
    scales = scales_ptr + _scale_row(e, n, N, F, FORMAT) * num_groups
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        byte = first * BYTES // BLOCK_K + tl.arange(0, BYTES)
        is_byte = byte < num_bytes
        w = tl.load(w_rows + byte[None, :], mask=is_column[:, None] & is_byte[None, :], other=0)
        mask = is_row[:, None] & is_byte[None, :]
        group = first * num_groups // K if HALVES else (first // 128 if FORMAT == 2 else 0)
        scale = _scale(tl.load(scales + group, mask=is_column, other=0), FORMAT)
        if HALVES:
            low_first: tl.constexpr = 1 if FORMAT == 4 else 0  # NF4 has the first number in the high half
            in_low = tl.load(x_rows + 2 * byte[None, :] + low_first, mask=mask, other=0.0)
            in_high = tl.load(x_rows + 2 * byte[None, :] + (1 - low_first), mask=mask, other=0.0)
            low, high = _number(w & 15, FORMAT), _number(w >> 4, FORMAT)
            if FORMAT == 4:
                low, high = low * scale[:, None], high * scale[:, None]
            part = tl.dot(in_low, tl.trans(low.to(dtype)), input_precision=PRECISION)
            part = tl.dot(in_high, tl.trans(high.to(dtype)), part, input_precision=PRECISION)
        else:
            x = tl.load(x_rows + byte[None, :], mask=mask, other=0.0)
            part = tl.dot(x, tl.trans(_number(w, FORMAT).to(dtype)), input_precision=PRECISION)
        total += part if FORMAT == 4 else part * scale[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + e * N + n, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if weights_ptr is not None:
            bias *= tl.load(weights_ptr + row, mask=is_row, other=0.0)[:, None]
        total += bias
    out = out_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def rows_of_block(rows_per_expert: int) -> int:
    """Rows of a tile, for any format."""
    return 16 if rows_per_expert <= 16 else 32 if rows_per_expert <= 32 else 64


def block_of(format: str, K: int, num_groups: int, rows_per_expert: int) -> dict[str, Any]:
    """Tile sizes of a launch, from shapes only."""
    rows = rows_of_block(rows_per_expert)
    columns = min(64, K // num_groups) if format in FOUR_BITS else 64
    warps = 8 if rows == 64 else 4
    return {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": columns, "num_warps": warps}


def grouped_product(
    x: Tensor,  # (R, K) rows, or (T, K) tokens if `gather`; contiguous, BF16, FP16 or FP32
    w_ENK: Tensor,  # (E, N, K) int8 or float8_e4m3fn, or (E, N, K / 2) uint8 of 4 bits; contiguous
    scales: Tensor,  # (E, N, groups), for FP8 (E, branches, blocks of rows, blocks of columns); contiguous
    rows: Rows,  # sorted rows, cut into tiles of block["BLOCK_M"]
    *,
    format: str,  # of `FORMATS`
    gather: bool,  # whether x holds tokens
    rows_per_branch: int,  # rows of W per branch, after which FP8 blocks start anew
    block: dict[str, Any],  # result of `block_of`
    bias_EN: Tensor | None = None,  # (E, N), contiguous
    weights_R: Tensor | None = None,  # (R,) FP32, factors of the rows' bias; None: 1
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
        bias_EN,
        weights_R,
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


@triton.jit(do_not_specialize=["num_rows"])
def _widen(
    w_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    N,
    K,
    F,
    num_groups,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a part of some rows of all matrices: numbers times scales, rounded to the type of float scales first."""
    HALVES: tl.constexpr = FORMAT == 1 or FORMAT > 2
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (row < num_rows)[:, None]
    BYTES: tl.constexpr = BLOCK_K // 2 if HALVES else BLOCK_K
    num_bytes = K // 2 if HALVES else K
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    mask = is_row & (byte < num_bytes)[None, :]
    w = tl.load(w_ptr + row[:, None] * num_bytes + byte[None, :], mask=mask, other=0)
    group = byte * num_groups // num_bytes if HALVES else (byte // 128 if FORMAT == 2 else byte * 0)
    places = _scale_row(row // N, row % N, N, F, FORMAT)[:, None] * num_groups + group[None, :]
    scale = _scale(tl.load(scales_ptr + places, mask=mask, other=0), FORMAT)
    if HALVES:
        low, high = _number(w & 15, FORMAT) * scale, _number(w >> 4, FORMAT) * scale
        if FORMAT == 4:
            low, high = high, low
        value = tl.join(low, high).reshape(BLOCK_M, BLOCK_K)
    else:
        value = _number(w, FORMAT) * scale
    if FORMAT != 3:
        value = value.to(scales_ptr.dtype.element_ty)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    out = out_ptr + row[:, None] * K + k[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=is_row & (k < K)[None, :])


def widen(
    w_ENK: Tensor,  # as in `grouped_product`
    scales: Tensor,  # as in `grouped_product`
    *,
    format: str,  # of `FORMATS`
    rows_per_branch: int,  # as in `grouped_product`
    dtype: torch.dtype,  # of the result
) -> Tensor:
    """Widen all matrices to (E, N, K), with the bits of the format's `wide`; does not synchronise."""
    E, N, num_bytes = w_ENK.shape
    K = 2 * num_bytes if format in FOUR_BITS else num_bytes
    out = torch.empty(E, N, K, dtype=dtype, device=w_ENK.device)
    if w_ENK.dtype == torch.float8_e4m3fn:
        w_ENK = w_ENK.view(torch.uint8)
    columns = min(512, triton.next_power_of_2(K))
    block = {"BLOCK_M": _WIDENED // columns, "BLOCK_K": columns}
    grid = triton.cdiv(E * N, block["BLOCK_M"]), triton.cdiv(K, columns)
    sizes = E * N, N, K, rows_per_branch, scales.shape[-1]
    launch(_widen, grid, w_ENK, scales, out, *sizes, FORMAT=FORMATS[format], **block)
    return out
