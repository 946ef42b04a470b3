"""Forward of the experts on sorted rows: H = gather(x) W_in^T + b_in, A' = s * act(H), Y = A' W_out^T + s * b_out.

The gather is fused into the loads of the first GEMM, activation and routing weight into its epilogue; nothing is
permuted in memory. `rows_times_weights` is the second GEMM and, with transposed weights, the input's gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from expertmesh.kernels.grouped import (
    Rows,
    activate,
    hidden_descriptor,
    product,
    round_pairs,
    row_weights,
    rows_from,
    second_branch,
    store_branches,
    store_rows,
    tile_place,
    tile_rows,
    unit_of_column,
)
from expertmesh.kernels.launch import launch
from expertmesh.kernels.tiles import UP_CHUNK, LaunchConfig, Tile, is_interleaved

_SIDE_BY_SIDE = 8
"""Adjacent hidden units of a branch inside a tile: a thread holds two of every eight columns of a product, which it can
round and store together.
"""


@triton.jit
def _up(
    x_ptr,
    w,
    bias_ptr,
    weights_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    h,
    a,
    h_low,
    a_low,
    F,
    D,
    G: tl.constexpr,
    UNITS: tl.constexpr,
    PAIRS: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
    RAGGED: tl.constexpr,
    TAILS: tl.constexpr,
    FLATTEN: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """Compute H and A' of all rows; h or a may be None. h_low and a_low are the same tensors as pointers, for tiles of
    half height."""
    num_m = tl.load(num_tiles_ptr)
    num_n = tl.cdiv(F, BLOCK_N)
    HALF: tl.constexpr = BLOCK_M // 2
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, tile_n = tile_place(tile, num_m, num_n, GROUP_M)
        e, first, end = tile_rows(m, tile_expert_ptr, tile_row_ptr, offsets_ptr)
        n = tile_n * BLOCK_N
        if TAILS and end - first <= HALF:
            _up_tile(
                x_ptr, w, bias_ptr, weights_ptr, token_of_row_ptr, slot_of_row_ptr, h_low, a_low, e, first, end, n,
                F, D, G, UNITS, PAIRS, INNER, INTERLEAVED, TMA, False, EVEN_N, EVEN_K, UPCAST, PRECISION,
                HALF, BLOCK_N, BLOCK_K, CHUNK_N,
            )  # fmt: skip
        else:
            _up_tile(
                x_ptr, w, bias_ptr, weights_ptr, token_of_row_ptr, slot_of_row_ptr, h, a, e, first, end, n,
                F, D, G, UNITS, PAIRS, INNER, INTERLEAVED, TMA, RAGGED, EVEN_N, EVEN_K, UPCAST, PRECISION,
                BLOCK_M, BLOCK_N, BLOCK_K, CHUNK_N,
            )  # fmt: skip


@triton.jit
def _up_tile(
    x_ptr,
    w,
    bias_ptr,
    weights_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    h,
    a,
    e,
    first,
    end,
    n,
    F,
    D,
    G: tl.constexpr,
    UNITS: tl.constexpr,
    PAIRS: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
    RAGGED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """Compute one tile of H and A'."""
    D64 = tl.cast(D, tl.int64)
    stride_n = D64 * (G if INTERLEAVED else 1)
    stride_g = D64 * (1 if INTERLEAVED else F)
    row, live = rows_from(first, end, BLOCK_M)
    # rows behind the expert's last one read the first row again, so loads need no mask
    token = tl.load(token_of_row_ptr + tl.where(live, row, first)).to(tl.int64)
    total = product(
        x_ptr, w, token, first, e, n, F, D, D64 * F * G, stride_n, stride_g,
        G, UNITS, True, False, TMA, EVEN_N, EVEN_K, UPCAST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    s = row_weights(weights_ptr, slot_of_row_ptr, row, live) if a is not None else None
    _store_hidden(
        total, e, n, row, live, first, end, s, F, bias_ptr, h, a, x_ptr.dtype.element_ty,
        G, UNITS, PAIRS, INNER, INTERLEAVED, RAGGED, BLOCK_M, BLOCK_N, CHUNK_N,
    )  # fmt: skip


@triton.jit
def _store_hidden(
    total,
    e,
    n,
    row,
    live,
    first,
    end,
    s,
    F,
    bias_ptr,
    h,
    a,
    OUT: tl.constexpr,
    G: tl.constexpr,
    UNITS: tl.constexpr,
    PAIRS: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """Add the bias to a tile of H; store H and A'. Recurses by halves down to CHUNK_N hidden units, because of
    registers."""
    if BLOCK_N > CHUNK_N:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = total.reshape(BLOCK_M, 2, HALF * G).permute(0, 2, 1).split()
        _store_hidden(
            left, e, n, row, live, first, end, s, F, bias_ptr, h, a, OUT,
            G, UNITS, PAIRS, INNER, INTERLEAVED, RAGGED, BLOCK_M, HALF, CHUNK_N,
        )  # fmt: skip
        _store_hidden(
            right, e, n + HALF, row, live, first, end, s, F, bias_ptr, h, a, OUT,
            G, UNITS, PAIRS, INNER, INTERLEAVED, RAGGED, BLOCK_M, HALF, CHUNK_N,
        )  # fmt: skip
    else:
        if bias_ptr is not None:
            f, g = unit_of_column(n, G, UNITS, BLOCK_N)
            bias = bias_ptr + e.to(tl.int64) * F * G + (f * G + g if INTERLEAVED else g * F + f)
            total += tl.load(bias, mask=f < F, other=0.0).to(tl.float32)[None, :]
        # A is computed from H as it is saved, so that the backward recomputes the same A
        hidden = round_pairs(total) if PAIRS else total.to(OUT)
        if G == 2:
            sides = hidden.reshape(BLOCK_M, BLOCK_N // UNITS, 2, UNITS).permute(0, 1, 3, 2)
            gate, up = sides.reshape(BLOCK_M, BLOCK_N, 2).split()
        else:
            gate = hidden
            up = None
        if h is not None:
            store_branches(h, gate, up, row, live, first, end, n, F, INTERLEAVED, RAGGED)
        if a is not None:
            act = activate(gate.to(tl.float32), INNER)
            if G == 2:
                act *= second_branch(up.to(tl.float32), INNER)
            store_rows(a, (act * s[:, None]).to(OUT), row, live, first, end, n, F, RAGGED)


@triton.jit
def _rows(
    a,
    w,
    bias_ptr,
    weights_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    y,
    a_low,
    y_low,
    N,
    K,
    K_MAJOR: tl.constexpr,
    TMA: tl.constexpr,
    RAGGED: tl.constexpr,
    TAILS: tl.constexpr,
    FLATTEN: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute y[row] = A[row] W[e]^T + s * bias[e] for W (E, N, K) if K_MAJOR, else A[row] W[e] for W (E, K, N)."""
    num_m = tl.load(num_tiles_ptr)
    num_n = tl.cdiv(N, BLOCK_N)
    HALF: tl.constexpr = BLOCK_M // 2
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, tile_n = tile_place(tile, num_m, num_n, GROUP_M)
        e, first, end = tile_rows(m, tile_expert_ptr, tile_row_ptr, offsets_ptr)
        n = tile_n * BLOCK_N
        if TAILS and end - first <= HALF:
            _rows_tile(
                a_low, w, bias_ptr, weights_ptr, slot_of_row_ptr, y_low, e, first, end, n, N, K,
                K_MAJOR, TMA, False, EVEN_N, EVEN_K, UPCAST, PRECISION, HALF, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _rows_tile(
                a, w, bias_ptr, weights_ptr, slot_of_row_ptr, y, e, first, end, n, N, K,
                K_MAJOR, TMA, RAGGED, EVEN_N, EVEN_K, UPCAST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _rows_tile(
    a,
    w,
    bias_ptr,
    weights_ptr,
    slot_of_row_ptr,
    y,
    e,
    first,
    end,
    n,
    N,
    K,
    K_MAJOR: tl.constexpr,
    TMA: tl.constexpr,
    RAGGED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute one tile of y."""
    K64 = tl.cast(K, tl.int64)
    row, live = rows_from(first, end, BLOCK_M)
    stride_n = K64 if K_MAJOR else tl.cast(N, tl.int64)
    total = product(
        a, w, tl.where(live, row, first), first, e, n, N, K, K64 * N, stride_n, 0,
        1, 1, K_MAJOR, TMA, TMA, EVEN_N, EVEN_K, UPCAST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if bias_ptr is not None:
        column = n + tl.arange(0, BLOCK_N)
        bias = tl.load(bias_ptr + e.to(tl.int64) * N + column, mask=column < N, other=0.0)
        s = row_weights(weights_ptr, slot_of_row_ptr, row, live)
        total += s[:, None] * bias.to(tl.float32)[None, :]
    if RAGGED:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = total.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        store_rows(y, left, row, live, first, end, n, N, RAGGED)
        store_rows(y, right, row, live, first, end, n + HALF, N, RAGGED)
    else:
        store_rows(y, total, row, live, first, end, n, N, RAGGED)


def row_options(config: LaunchConfig, tile: Tile, rows: Rows, n: int, k: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid, constants and launch options of a GEMM over routed rows with n columns and a sum over k."""
    bound = rows.most_tiles * triton.cdiv(n, tile.block_n)
    return (min(config.num_programs * tile.programs, bound),), {
        "RAGGED": config.tma and tile.ragged,
        "TAILS": tile.tails,
        "FLATTEN": tile.flatten,
        "EVEN_N": n % tile.block_n == 0,
        "EVEN_K": k % tile.block_k == 0,
        "UPCAST": config.interpreted,
        "PRECISION": config.precision,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def low(value: Any, tile: Tile) -> Any:
    """Argument for tiles of half height; None if the tile config has no such tiles."""
    return value if tile.tails else None


def up(
    x_TD: Tensor,  # (T, D) tokens, contiguous
    w_in_EGFD: Tensor,  # (E, G, F, D), contiguous or interleaved (see `is_interleaved`)
    b_in_EGF: Tensor | None,  # (E, G, F) stored like w_in, or None
    weights_TK: Tensor,  # (T, K) routing weights, contiguous
    rows: Rows,  # sorted rows, cut into tiles of config.block_m
    config: LaunchConfig,  # tile sizes
    *,
    inner: str,  # the point-wise function in the activation: silu, gelu, relu, relu2 or clamped_silu
    store_h: bool,  # whether to store H
    store_a: bool,  # whether to store A'
) -> tuple[Tensor, Tensor]:
    """Compute the first GEMM and the activation.

    Returns:
        H (R, G * F), its columns in the order of w_in in memory, and A' = s * act(H) (R, F); unneeded results have no
        rows. Rows behind the last live one are not written. Does not synchronise.
    """
    E, G, F, D = w_in_EGFD.shape
    R, tile = rows.num_rows, config.up
    h = torch.empty(R if store_h else 0, G * F, dtype=x_TD.dtype, device=x_TD.device)
    a = torch.empty(R if store_a else 0, F, dtype=x_TD.dtype, device=x_TD.device)
    if R == 0 or not (store_h or store_a):
        return h, a
    w: Any = w_in_EGFD
    side = _SIDE_BY_SIDE if config.tma and F % _SIDE_BY_SIDE == 0 else 1
    if config.tma and G == 1:
        w = TensorDescriptor.from_tensor(w_in_EGFD[:, 0], [1, tile.block_n, tile.block_k])
    elif config.tma:
        box = [1, tile.block_n // side, G, side, tile.block_k]
        w = TensorDescriptor.from_tensor(w_in_EGFD.unflatten(2, (-1, side)).transpose(1, 2), box)
    interleaved = is_interleaved(w_in_EGFD)
    grid, options = row_options(config, tile, rows, F, D)
    chunk = tile.chunk or UP_CHUNK
    if interleaved and options["RAGGED"]:  # pairs are stored through a buffer of twice the columns
        chunk = min(chunk, UP_CHUNK // 2)
    units = min(tile.block_n, chunk)
    h_out: Any = h if store_h else None
    a_out: Any = a if store_a else None
    h_low, a_low = low(h_out, tile), low(a_out, tile)
    if options["RAGGED"] and store_h:
        h_out = hidden_descriptor(h, G, [tile.block_m, units], interleaved=interleaved)
    if options["RAGGED"] and store_a:
        a_out = create_ragged_descriptor(a, [tile.block_m, units])
    launch(
        _up,
        grid,
        x_TD,
        w,
        b_in_EGF,
        weights_TK,
        rows.token_of_row_N,
        rows.slot_of_row_N,
        rows.offsets_E,
        rows.tile_expert,
        rows.tile_row,
        rows.num_tiles,
        h_out,
        a_out,
        h_low,
        a_low,
        F,
        D,
        G=G,
        UNITS=side,
        PAIRS=config.tma and x_TD.dtype == torch.bfloat16 and not config.interpreted,
        INNER=inner,
        INTERLEAVED=interleaved,
        TMA=config.tma,
        CHUNK_N=chunk,
        **options,
    )
    return h, a


def rows_times_weights(
    a_RK: Tensor,  # (R, K) rows, contiguous
    w: Tensor,  # (E, N, K) if transposed, else (E, K, N), contiguous
    rows: Rows,  # sorted rows, cut into tiles of config.block_m
    config: LaunchConfig,  # tile sizes and precision
    tile: Tile,  # config.down or config.input_grad
    *,
    transposed: bool,  # whether to multiply by the transposed matrix
    b_out_ED: Tensor | None = None,  # (E, N) bias, scaled by the routing weight, or None
    weights_TK: Tensor | None = None,  # routing weights, needed with b_out
    out: Tensor | None = None,  # (R, N) for the result, or None
) -> Tensor:
    """Multiply every row by its expert's matrix.

    Returns:
        (R, N) in the dtype of a; rows behind the last live one are not written. Does not synchronise.
    """
    R, K = a_RK.shape
    N = w.shape[1] if transposed else w.shape[2]
    y = torch.empty(R, N, dtype=a_RK.dtype, device=a_RK.device) if out is None else out
    if R == 0:
        return y
    grid, options = row_options(config, tile, rows, N, K)
    a_arg: Any = a_RK
    w_arg: Any = w
    a_low, y_low = low(a_RK, tile), low(y, tile)
    if config.tma:
        a_arg = TensorDescriptor.from_tensor(a_RK, [tile.block_m, tile.block_k])
        a_low = low(TensorDescriptor.from_tensor(a_RK, [tile.block_m // 2, tile.block_k]), tile)
        if transposed:
            w_arg = TensorDescriptor.from_tensor(w, [1, tile.block_n, tile.block_k])
        else:
            w_arg = TensorDescriptor.from_tensor(w, [1, tile.block_k, tile.block_n])
    y_out: Any = y
    if options["RAGGED"]:
        y_out = create_ragged_descriptor(y, [tile.block_m, tile.block_n // 2])
    launch(
        _rows,
        grid,
        a_arg,
        w_arg,
        b_out_ED,
        weights_TK,
        rows.slot_of_row_N,
        rows.offsets_E,
        rows.tile_expert,
        rows.tile_row,
        rows.num_tiles,
        y_out,
        a_low,
        y_low,
        N,
        K,
        K_MAJOR=transposed,
        TMA=config.tma,
        **options,
    )
    return y
