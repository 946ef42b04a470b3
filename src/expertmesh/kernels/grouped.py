"""Shared parts of the experts' GEMM kernels: tile positions, products, activations, access to rows of H.

A tile of the result belongs to one expert and has BLOCK_M of its sorted rows (fewer at its end). Programs are
persistent: program p of n takes the tiles p, p + n, .... The number of tiles is read from device memory.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices

from expertmesh.kernels.route_metadata import tile_table


@dataclass(frozen=True)
class Rows:
    """Sorted rows and their division into tiles."""

    offsets_E: Tensor  # (E + 1,) int32; rows of expert e are [offsets[e], offsets[e + 1])
    token_of_row_N: Tensor  # (R,) int32, the token of each row
    slot_of_row_N: Tensor  # (R,) int32, the slot of each row
    tile_expert: Tensor  # int32, the expert of each tile
    tile_row: Tensor  # int32, the first row of each tile
    num_tiles: Tensor  # (1,) int32, the number of used tiles

    @staticmethod
    def cut(offsets_E: Tensor, token_of_row_N: Tensor, slot_of_row_N: Tensor, block_m: int) -> "Rows":
        """Cut every expert's rows into tiles of block_m rows; one launch, no synchronisation."""
        table = tile_table(offsets_E, token_of_row_N.shape[0], block_m)
        return Rows(offsets_E, token_of_row_N, slot_of_row_N, *table)

    @staticmethod
    def uncut(offsets_E: Tensor, token_of_row_N: Tensor, slot_of_row_N: Tensor) -> "Rows":
        """Sorted rows without tiles, for sums over an expert's rows; no launch."""
        none = offsets_E[:0]
        return Rows(offsets_E, token_of_row_N, slot_of_row_N, none, none, none)

    @property
    def num_rows(self) -> int:
        """Static bound on the number of rows, R."""
        return self.token_of_row_N.shape[0]

    @property
    def most_tiles(self) -> int:
        """Static bound on the number of tiles."""
        return self.tile_expert.shape[0]


def hidden_descriptor(h_RH: Tensor, num_branches: int, block: list[int], *, interleaved: bool) -> Any:
    """Make a tensor descriptor of H or dH as (rows, branches, columns); interleaved branches are one of twice the
    columns."""
    rows, units = block
    if interleaved:
        return create_ragged_descriptor(h_RH[:, None], [rows, 1, 2 * units])
    return create_ragged_descriptor(h_RH.view(h_RH.shape[0], num_branches, -1), [rows, 1, units])


@triton.jit
def tile_place(index, num_m, num_n, GROUP_M: tl.constexpr):
    """Compute row tile and column tile of a tile index: GROUP_M row tiles, then the next column, so that weights stay
    in L2."""
    group = index // (GROUP_M * num_n)
    rows = tl.minimum(num_m - group * GROUP_M, GROUP_M)
    within = index % (GROUP_M * num_n)
    return group * GROUP_M + within % rows, within // rows


@triton.jit
def tile_rows(m, tile_expert_ptr, tile_row_ptr, offsets_ptr):
    """Load the expert and the first row of a tile, and the end of the expert's rows."""
    e = tl.load(tile_expert_ptr + m)
    return e, tl.load(tile_row_ptr + m), tl.load(offsets_ptr + e + 1)


@triton.jit
def rows_from(first, end, BLOCK_M: tl.constexpr):
    """Compute the rows of a tile as int64, and a mask of the expert's rows."""
    row = first + tl.arange(0, BLOCK_M)
    return row.to(tl.int64), row < end


@triton.jit
def unit_of_column(n, G: tl.constexpr, UNITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute hidden unit and branch of each column of a tile that begins at unit n; UNITS columns of a branch are
    adjacent."""
    column = tl.arange(0, BLOCK_N * G)
    return n + column // (G * UNITS) * UNITS + column % UNITS, column // UNITS % G


@triton.jit
def product(
    a,
    w,
    row,
    first,
    e,
    n,
    N,
    K,
    stride_e,
    stride_n,
    stride_g,
    G: tl.constexpr,
    UNITS: tl.constexpr,
    K_MAJOR: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the sum over k of A[row, k] W[e, n, k] in FP32, (BLOCK_M, BLOCK_N * G).

    A is (rows, K): `row` holds the rows to read, `first` their start if a descriptor reads them. If K_MAJOR, W is (E,
    N, G, K) with the given strides. Columns of the result then alternate between UNITS units of g = 0 and the same
    units of g = 1, so that both branches of a unit are in one thread. Otherwise W is (E, K, N) and G is 1.
    """
    k = tl.arange(0, BLOCK_K)
    n_of_column, g = unit_of_column(n, G, UNITS, BLOCK_N)
    base = e.to(tl.int64) * stride_e
    if not A_TMA:
        a_block = a + row[:, None] * K + k[None, :]
    if not W_TMA:
        if K_MAJOR:
            w_column = n_of_column.to(tl.int64) * stride_n + g.to(tl.int64) * stride_g
            w_block = w + base + w_column[None, :] + k[:, None]
        else:
            w_block = w + base + k.to(tl.int64)[:, None] * stride_n + n_of_column[None, :]
    inside = (n_of_column < N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N * G), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        start = step * BLOCK_K
        within = start + k < K
        if A_TMA:
            left = a.load([first, start])
        elif EVEN_K:
            left = tl.load(a_block + start)
        else:
            left = tl.load(a_block + start, mask=within[None, :], other=0.0)
        if W_TMA:
            if K_MAJOR and G == 1:
                right = w.load([e, n, start]).reshape(BLOCK_N, BLOCK_K).T
            elif K_MAJOR:
                right = w.load([e, n // UNITS, 0, 0, start]).reshape(BLOCK_N * G, BLOCK_K).T
            else:
                right = w.load([e, start, n]).reshape(BLOCK_K, BLOCK_N)
        else:
            further = w_block + (start if K_MAJOR else start * stride_n)
            if EVEN_N and EVEN_K:
                right = tl.load(further)
            else:
                right = tl.load(further, mask=inside & within[:, None], other=0.0)
        if UPCAST:  # the interpreter cannot multiply BF16
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def round_pairs(x):
    """Convert FP32 to BF16 by a packed NVIDIA instruction, two numbers each: Triton's conversion of single numbers
    waits for the special function unit if FP32 is still needed."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,f,f",
        [x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def sigmoid(h):
    """Compute 1 / (1 + exp(-h)) in FP32 by exp2 and rsqrt, because exp and a division each rescale numbers below
    2**-126."""
    root = tl.rsqrt(1.0 + tl.exp2(h * -1.4426950408889634))
    return root * root


@triton.jit
def activate(h, INNER: tl.constexpr):
    """Compute act(h) in FP32; NaN stays NaN."""
    if INNER == "silu":
        return h * sigmoid(h)
    if INNER == "gelu":
        return 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    if INNER == "clamped_silu":
        small = tl.where(h > 7.0, 7.0, h)
        return small * sigmoid(1.702 * small)
    positive = tl.where(h < 0.0, 0.0, h)
    if INNER == "relu":
        return positive
    return positive * positive


@triton.jit
def slope(h, INNER: tl.constexpr):
    """Compute the derivative of act at h in FP32."""
    if INNER == "silu":
        share = sigmoid(h)
        return share * (1.0 + h * (1.0 - share))
    if INNER == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
        return cdf + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)
    if INNER == "relu":
        return tl.where(h <= 0.0, 0.0, 1.0)
    if INNER == "clamped_silu":
        share = sigmoid(1.702 * h)
        return tl.where(h > 7.0, 0.0, share * (1.0 + 1.702 * h * (1.0 - share)))
    return 2.0 * tl.where(h < 0.0, 0.0, h)


@triton.jit
def second_branch(up, INNER: tl.constexpr):
    """Factor of act(gate): up, or clamp(up, -7, 7) + 1, in FP32; NaN stays NaN."""
    if INNER == "clamped_silu":
        return tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return up


@triton.jit
def second_slope(up, INNER: tl.constexpr):
    """Compute the derivative of `second_branch` at up in FP32."""
    if INNER == "clamped_silu":
        return tl.where(tl.abs(up) > 7.0, 0.0, 1.0)
    return 1.0


@triton.jit
def load_branches(h_ptr, row, live, n, F, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load gate and up of BLOCK_N hidden units from rows of H, as FP32."""
    base = h_ptr + row[:, None] * (2 * F)
    if INTERLEAVED:
        column = 2 * n + tl.arange(0, 2 * BLOCK_N)
        mask = live[:, None] & (column < 2 * F)[None, :]
        pair = tl.load(base + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate, up = pair.reshape(live.shape[0], BLOCK_N, 2).split()
    else:
        column = n + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (column < F)[None, :]
        gate = tl.load(base + column[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(base + F + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def store_branches(
    h,
    gate,
    up,
    row,
    live,
    first,
    end,
    n,
    F,
    INTERLEAVED: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Store the branches in rows of H or dH: gate then up, alternating if INTERLEAVED; up is None with one branch.

    If RAGGED, h is a descriptor from `hidden_descriptor`.
    """
    BLOCK_M: tl.constexpr = gate.shape[0]
    BLOCK_N: tl.constexpr = gate.shape[1]
    if up is None:
        _store_branch(h, gate, row, live, first, end, 0, n, F, F, RAGGED)
    elif INTERLEAVED:
        pair = tl.join(gate, up).reshape(BLOCK_M, 2 * BLOCK_N)
        _store_branch(h, pair, row, live, first, end, 0, 2 * n, 2 * F, 2 * F, RAGGED)
    else:
        _store_branch(h, gate, row, live, first, end, 0, n, F, 2 * F, RAGGED)
        _store_branch(h, up, row, live, first, end, 1, n, F, 2 * F, RAGGED)


@triton.jit
def _store_branch(
    h, value, row, live, first, end, g, n, width, stride, RAGGED: tl.constexpr
):  # fmt: skip
    """Store columns of branch g, from column n on; the branch has `width` of a row's `stride` columns."""
    BLOCK_M: tl.constexpr = value.shape[0]
    BLOCK_N: tl.constexpr = value.shape[1]
    if RAGGED:
        top, behind, place = to_ragged_indices(first, end - first, 0)
        h.store([top, behind, place, g, n], value.reshape(1, 1, BLOCK_M, 1, BLOCK_N))
    else:
        column = n + tl.arange(0, BLOCK_N)
        places = h + row[:, None] * stride + (g * width + column)[None, :]
        tl.store(places, value, mask=live[:, None] & (column < width)[None, :])


@triton.jit
def store_rows(out, value, row, live, first, end, n, N, RAGGED: tl.constexpr):
    """Store columns of rows (rows, N), from column n on; dead rows and columns behind N are masked.

    If RAGGED, out is a ragged descriptor: the copy engine stores the tile from shared memory while the program
    continues.
    """
    BLOCK_M: tl.constexpr = value.shape[0]
    BLOCK_N: tl.constexpr = value.shape[1]
    if RAGGED:
        top, behind, place = to_ragged_indices(first, end - first, 0)
        out.store([top, behind, place, n], value.to(out.dtype).reshape(1, 1, BLOCK_M, BLOCK_N))
    else:
        column = n + tl.arange(0, BLOCK_N)
        places = out + row[:, None] * N + column[None, :]
        mask = live[:, None] & (column < N)[None, :]
        tl.store(places, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fetch_hidden(h_ptr, first, end, n, F, G: tl.constexpr, INTERLEAVED: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Prefetch a tile of H into L2 before the epilogue reads it; NVIDIA only."""
    LINE: tl.constexpr = 1024 // h_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.cdiv(BLOCK_N * G, LINE)
    row = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1).to(tl.int64)
    unit = tl.arange(0, LINES) * LINE
    if G == 2 and not INTERLEAVED and LINES > 1:
        column = (unit // BLOCK_N) * F + tl.minimum(n + unit % BLOCK_N, F - 1)
    else:
        column = tl.minimum(n * G + unit, F * G - 1)
    lines = h_ptr + row[:, None] * (F * G) + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def row_weights(weights_ptr, slot_of_row_ptr, row, live):
    """Load the routing weights of rows as FP32; 0 behind the expert's last row."""
    slot = tl.load(slot_of_row_ptr + row, mask=live, other=0).to(tl.int64)
    return tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)
