"""Gradients of the experts' weights and biases: sums over an expert's rows.

dW_out[e] = gather(dO)^T A' and dW_in[e] = dH^T gather(x). One operand is in row order, the other is gathered in its
loads. Every element is written by one program, and experts without rows get zeros, so no memory is cleared first. If an
expert has fewer tiles than the GPU has multiprocessors, a very hot expert's sum is split (see `split_rows`). Partial
sums are added in a fixed order, so results are deterministic. `accumulate` adds to a buffer instead (FP32 main
gradients).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from expertmesh.kernels.grouped import Rows, tile_place
from expertmesh.kernels.launch import launch
from expertmesh.kernels.split_rows import Pieces, add, cut, rows_of_pieces
from expertmesh.kernels.tiles import LaunchConfig, Tile

_SUM_ROWS = 32
_SUM_COLUMNS = 128


@triton.jit
def _rows_transposed(
    dense,
    source_ptr,
    token_of_row_ptr,
    offsets_ptr,
    start_ptr,
    end_ptr,
    expert_ptr,
    place_ptr,
    count_ptr,
    work_ptr,
    out_ptr,
    num_experts,
    M,
    N,
    GATHERED_M: tl.constexpr,
    TMA: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute out[e] (M, N) = sum over rows r of e of A[r]^T B[r]; A is gathered if GATHERED_M, else B is.

    With a list of pieces, the sums over an expert's pieces go to their places in the workspace instead.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    per_expert = num_m * num_n
    num_sums = num_experts if work_ptr is None else tl.load(count_ptr)
    for tile in tl.range(tl.program_id(0), num_sums * per_expert, tl.num_programs(0)):
        e = tile // per_expert
        tile_m, tile_n = tile_place(tile % per_expert, num_m, num_n, GROUP_M)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        if work_ptr is None:
            start = tl.load(offsets_ptr + e)
            end = tl.load(offsets_ptr + e + 1)
        else:
            # pieces of hot experts are last in the list; they are long, so they are processed first
            piece = num_sums - 1 - e
            e = tl.load(expert_ptr + piece)
            start = tl.load(start_ptr + piece)
            end = tl.load(end_ptr + piece)
            place = tl.load(place_ptr + piece)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # one loop for all steps: loads behind a pipelined loop would not be overlapped
        for step in tl.range(0, tl.cdiv(end - start, BLOCK_K)):
            total = _add_step(
                dense,
                source_ptr,
                token_of_row_ptr,
                start,
                step * BLOCK_K,
                end,
                tile_m * BLOCK_M,
                tile_n * BLOCK_N,
                M,
                N,
                total,
                GATHERED_M,
                TMA,
                EVEN_M,
                EVEN_N,
                UPCAST,
                PRECISION,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        out_rows = out_ptr + (e.to(tl.int64) * M + m) * N
        n = tile_n * BLOCK_N
        if work_ptr is not None:
            if place >= 0:
                work_rows = work_ptr + (place.to(tl.int64) * M + m) * N
                _write(work_rows, m < M, n, N, total, False, ACCUMULATE, BLOCK_M, BLOCK_N)
            else:
                _write(out_rows, m < M, n, N, total, ACCUMULATE, ACCUMULATE, BLOCK_M, BLOCK_N)
        else:
            _write(out_rows, m < M, n, N, total, ACCUMULATE, ACCUMULATE, BLOCK_M, BLOCK_N)


@triton.jit
def _write(
    out_rows,
    inside,
    n,
    N,
    total,
    ACCUMULATE: tl.constexpr,
    BY_HALVES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store or add a tile. By halves if addresses and the previous sum need as many registers as the tile."""
    if BY_HALVES and BLOCK_N > 64:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = total.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _write(out_rows, inside, n, N, left, ACCUMULATE, True, BLOCK_M, HALF)
        _write(out_rows, inside, n + HALF, N, right, ACCUMULATE, True, BLOCK_M, HALF)
    else:
        column = n + tl.arange(0, BLOCK_N)
        out = out_rows[:, None] + column[None, :]
        mask = inside[:, None] & (column < N)[None, :]
        if ACCUMULATE:
            total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(out_rows.dtype.element_ty), mask=mask)


@triton.jit
def _add_step(
    dense,
    source_ptr,
    token_of_row_ptr,
    start,
    done,
    end,
    m,
    n,
    M,
    N,
    total,
    GATHERED_M: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add the products of BLOCK_K rows, the first of them `done` rows behind start; rows from end on count as zeros."""
    row = start + done + tl.arange(0, BLOCK_K)
    live = row < end
    token = tl.load(token_of_row_ptr + row, mask=live, other=0).to(tl.int64)
    if GATHERED_M:
        left = _gather_columns(source_ptr, token, live, m, M, EVEN_M, BLOCK_M)
        if TMA:
            right = load_ragged(dense, start, end - start, [done, n])
        else:
            right = _gather_rows(dense, row.to(tl.int64), live, n, N, EVEN_N, BLOCK_N)
    else:
        if TMA:
            left = load_ragged(dense, start, end - start, [done, m]).T
        else:
            left = _gather_columns(dense, row.to(tl.int64), live, m, M, EVEN_M, BLOCK_M)
        right = _gather_rows(source_ptr, token, live, n, N, EVEN_N, BLOCK_N)
    if UPCAST:  # the interpreter cannot multiply BF16
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _gather_rows(source, row, live, column, width, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of rows of a matrix (rows, width); zeros for dead rows and behind the width."""
    columns = column + tl.arange(0, BLOCK)
    mask = live[:, None] if EVEN else live[:, None] & (columns < width)[None, :]
    return tl.load(source + row[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _gather_columns(source, row, live, column, width, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of rows transposed, like `_gather_rows`. By transposed pointers, because sm_80 copies asynchronously
    only then."""
    columns = column + tl.arange(0, BLOCK)
    mask = live[None, :] if EVEN else live[None, :] & (columns < width)[:, None]
    return tl.load(source + row[None, :] * width + columns[:, None], mask=mask, other=0.0)


@triton.jit
def _sum_columns(
    source_ptr,
    index_of_row_ptr,
    weights_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    out_ptr,
    width,
    ACCUMULATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[e] = sum over rows r of e of (s_r *) source[index[r]], or source[r] without an index."""
    e = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = tl.load(offsets_ptr + e)
    end = tl.load(offsets_ptr + e + 1)
    total = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    for first in tl.range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        live = row < end
        index = row
        if index_of_row_ptr is not None:
            index = tl.load(index_of_row_ptr + row, mask=live, other=0)
        pointers = source_ptr + index.to(tl.int64)[:, None] * width + column[None, :]
        block = tl.load(pointers, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if weights_ptr is not None:
            slot = tl.load(slot_of_row_ptr + row, mask=live, other=0).to(tl.int64)
            s = tl.load(weights_ptr + slot, mask=live, other=0.0).to(tl.float32)
            block *= s[:, None]
        total += block
    out = out_ptr + e.to(tl.int64) * width + column
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside)


def weight_grad(
    dense_RM: Tensor,  # (R, ...) rows in order: A' or dH, contiguous
    source_TN: Tensor,  # (T, ...) tokens: dO or x, contiguous
    rows: Rows,  # sorted rows, with or without tiles
    config: LaunchConfig,  # precision, and whether to use descriptors
    tile: Tile,  # config.w_in_grad or config.w_out_grad
    *,
    gathered_rows: bool,  # whether the tokens' width is the first dimension of a weight (dW_out) or the last (dW_in)
    out: Tensor,  # (E, M, N) in memory order, contiguous, any floating-point dtype; every element is written
    accumulate: bool = False,  # add to `out` instead
) -> None:
    """Write or add, for each expert, the sum over its rows of outer products of A' and dO, or of dH and x."""
    num_experts = rows.offsets_E.shape[0] - 1
    widths = (source_TN.shape[1], dense_RM.shape[1])
    M, N = widths if gathered_rows else widths[::-1]
    if out.numel() == 0:
        return
    if rows.num_rows == 0:
        if not accumulate:
            out.zero_()
        return
    block = tile.block_n if gathered_rows else tile.block_m
    p = _split(rows, config, tile, M, N)
    num_sums = num_experts if p is None else p.start.shape[0]
    tiles = num_sums * triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    num_programs = min(config.num_programs * tile.programs, tiles)
    launch(
        _rows_transposed,
        (num_programs,),
        create_ragged_descriptor(dense_RM, [tile.block_k, block]) if config.tma else dense_RM,
        source_TN,
        rows.token_of_row_N,
        rows.offsets_E,
        *((None,) * 6 if p is None else (p.start, p.end, p.expert, p.place, p.num_pieces, p.work)),
        out,
        num_experts,
        M,
        N,
        GATHERED_M=gathered_rows,
        TMA=config.tma,
        ACCUMULATE=accumulate,
        EVEN_M=M % tile.block_m == 0,
        EVEN_N=N % tile.block_n == 0,
        UPCAST=config.interpreted,
        PRECISION=config.precision,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if p is not None:
        add(p, out, accumulate=accumulate)


def _split(rows: Rows, config: LaunchConfig, tile: Tile, M: int, N: int) -> Pieces | None:
    """Cut experts with many rows into pieces; None if one expert's tiles keep the GPU busy, or rows are few."""
    most = config.sharing // (triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n))
    if most < 2:
        return None
    piece_rows = rows_of_pieces(rows.num_rows, most, config.piece_rows, tile.block_k)
    if piece_rows >= rows.num_rows:
        return None
    return cut(rows.offsets_E, piece_rows, rows.num_rows, M, N)


def bias_grad(
    source: Tensor,  # (R, N) rows, or (T, N) tokens if gathered; contiguous
    rows: Rows,  # sorted rows
    *,
    out: Tensor,  # (E, N) contiguous; every element is written
    gathered: bool,  # whether source holds tokens
    weights_TK: Tensor | None = None,  # routing weights to multiply by, or None
    accumulate: bool = False,  # add to `out` instead
) -> None:
    """Write or add the sum of an expert's rows: db_in from dH, or db_out from s * gather(dO)."""
    num_experts, width = out.shape
    launch(
        _sum_columns,
        (num_experts, triton.cdiv(width, _SUM_COLUMNS)),
        source,
        rows.token_of_row_N if gathered else None,
        weights_TK,
        rows.slot_of_row_N,
        rows.offsets_E,
        out,
        width,
        ACCUMULATE=accumulate,
        BLOCK_R=_SUM_ROWS,
        BLOCK=_SUM_COLUMNS,
        num_warps=4,
    )
