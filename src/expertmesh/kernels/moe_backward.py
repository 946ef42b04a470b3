"""Gradients of the experts' hidden rows and of the routing weights.

The kernel computes G = gather(dO) W_out. Its epilogue computes from the saved H: A' = s * act(H) for the gradient of
W_out, dH, and per row and column tile the partial sum of G * act(H). `routing_weight_grad` adds the partial sums in a
fixed order. They are the gradient of the routing weight, because <dO, A W_out^T> = <dO W_out, A>; neither Y nor atomics
are needed.
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
    fetch_hidden,
    hidden_descriptor,
    load_branches,
    product,
    row_weights,
    rows_from,
    second_branch,
    second_slope,
    slope,
    store_branches,
    store_rows,
    tile_place,
    tile_rows,
)
from expertmesh.kernels.launch import launch
from expertmesh.kernels.moe_forward import low, row_options
from expertmesh.kernels.tiles import HIDDEN_GRAD_CHUNK, LaunchConfig

_BIAS_COLUMNS = 64


@triton.jit
def _through_activation(
    grad,
    s,
    row,
    live,
    first,
    end,
    n,
    F,
    h_ptr,
    a,
    d_h,
    G: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """Store A' and dH of a tile; return the sum of grad * act(H) per row. Recurses by halves down to CHUNK_N columns.

    A tile as wide as the product's would leave no registers for H and the gradients.
    """
    if BLOCK_N > CHUNK_N:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = grad.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        partial = _through_activation(
            left, s, row, live, first, end, n, F, h_ptr, a, d_h,
            G, INNER, INTERLEAVED, RAGGED, BLOCK_M, HALF, CHUNK_N,
        )  # fmt: skip
        partial += _through_activation(
            right, s, row, live, first, end, n + HALF, F, h_ptr, a, d_h,
            G, INNER, INTERLEAVED, RAGGED, BLOCK_M, HALF, CHUNK_N,
        )  # fmt: skip
    else:
        dtype = h_ptr.dtype.element_ty
        if G == 2:
            gate, up = load_branches(h_ptr, row, live, n, F, INTERLEAVED, BLOCK_N)
        else:
            f = n + tl.arange(0, BLOCK_N)
            places = h_ptr + row[:, None] * F + f[None, :]
            gate = tl.load(places, mask=live[:, None] & (f < F)[None, :], other=0.0).to(tl.float32)
        act = activate(gate, INNER)
        hidden = act
        if G == 2:
            other = second_branch(up, INNER)
            hidden = act * other
        # columns behind F: grad is 0 there, and act of the zeros loaded for H is 0
        partial = tl.sum(grad * hidden, 1)
        if a is not None:
            store_rows(a, (hidden * s[:, None]).to(dtype), row, live, first, end, n, F, RAGGED)
        if d_h is not None:
            grad *= s[:, None]
            if G == 2:
                d_gate = (grad * other * slope(gate, INNER)).to(dtype)
                d_up = (grad * act * second_slope(up, INNER)).to(dtype)
            else:
                d_gate = (grad * slope(gate, INNER)).to(dtype)
                d_up = None
            store_branches(d_h, d_gate, d_up, row, live, first, end, n, F, INTERLEAVED, RAGGED)
    return partial


@triton.jit(do_not_specialize=["num_rows"])
def _hidden_grad(
    grad_ptr,
    w,
    weights_ptr,
    h_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    a,
    d_h,
    a_low,
    d_h_low,
    partial_ptr,
    num_rows,
    F,
    D,
    G: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
    FETCH: tl.constexpr,
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
    """Compute A', dH and partial[tile_n, row] of all rows; a, d_h or partial_ptr may be None."""
    num_m = tl.load(num_tiles_ptr)
    num_n = tl.cdiv(F, BLOCK_N)
    HALF: tl.constexpr = BLOCK_M // 2
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        m, tile_n = tile_place(tile, num_m, num_n, GROUP_M)
        e, first, end = tile_rows(m, tile_expert_ptr, tile_row_ptr, offsets_ptr)
        n = tile_n * BLOCK_N
        partial = partial_ptr
        if partial_ptr is not None:
            partial += tile_n.to(tl.int64) * num_rows
        if TAILS and end - first <= HALF:
            _hidden_grad_tile(
                grad_ptr, w, weights_ptr, h_ptr, token_of_row_ptr, slot_of_row_ptr, a_low, d_h_low, partial,
                e, first, end, n, F, D, G, INNER, INTERLEAVED, TMA, FETCH, False, EVEN_N, EVEN_K, UPCAST, PRECISION,
                HALF, BLOCK_N, BLOCK_K, CHUNK_N,
            )  # fmt: skip
        else:
            _hidden_grad_tile(
                grad_ptr, w, weights_ptr, h_ptr, token_of_row_ptr, slot_of_row_ptr, a, d_h, partial,
                e, first, end, n, F, D, G, INNER, INTERLEAVED, TMA, FETCH, RAGGED, EVEN_N, EVEN_K, UPCAST, PRECISION,
                BLOCK_M, BLOCK_N, BLOCK_K, CHUNK_N,
            )  # fmt: skip


@triton.jit
def _hidden_grad_tile(
    grad_ptr,
    w,
    weights_ptr,
    h_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    a,
    d_h,
    partial_ptr,
    e,
    first,
    end,
    n,
    F,
    D,
    G: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
    FETCH: tl.constexpr,
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
    """Compute one tile of A', dH and the partial sums."""
    row, live = rows_from(first, end, BLOCK_M)
    if FETCH:
        fetch_hidden(h_ptr, first, end, n, F, G, INTERLEAVED, BLOCK_M, BLOCK_N)
    token = tl.load(token_of_row_ptr + tl.where(live, row, first)).to(tl.int64)
    grad = product(
        grad_ptr, w, token, first, e, n, F, D, tl.cast(D, tl.int64) * F, tl.cast(F, tl.int64), 0,
        1, 1, False, False, TMA, EVEN_N, EVEN_K, UPCAST, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    s = row_weights(weights_ptr, slot_of_row_ptr, row, live)
    partial = _through_activation(
        grad, s, row, live, first, end, n, F, h_ptr, a, d_h,
        G, INNER, INTERLEAVED, RAGGED, BLOCK_M, BLOCK_N, CHUNK_N,
    )  # fmt: skip
    if partial_ptr is not None:
        tl.store(partial_ptr + row, partial, mask=live)


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _routing_weight_grad(
    partial_ptr,
    grad_ptr,
    bias_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    out_ptr,
    num_rows,
    num_partials,
    D,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[slot of row] = sum of the row's partial sums (+ dO . b_out)."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles_ptr):
        e, first, end = tile_rows(tile, tile_expert_ptr, tile_row_ptr, offsets_ptr)
        row, live = rows_from(first, end, BLOCK_M)
        total = tl.zeros((BLOCK_M,), tl.float32)
        stride = tl.cast(num_rows, tl.int64)
        for i in tl.range(0, num_partials):
            total += tl.load(partial_ptr + i * stride + row, mask=live, other=0.0)
        if bias_ptr is not None:
            token = tl.load(token_of_row_ptr + row, mask=live, other=0).to(tl.int64)
            dots = tl.zeros((BLOCK_M, BLOCK), tl.float32)
            for start in tl.range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                inside = d < D
                bias = tl.load(bias_ptr + e.to(tl.int64) * D + d, mask=inside, other=0.0)
                pointers = grad_ptr + token[:, None] * D + d[None, :]
                grad = tl.load(pointers, mask=live[:, None] & inside[None, :], other=0.0)
                dots += grad.to(tl.float32) * bias.to(tl.float32)[None, :]
            total += tl.sum(dots, 1)
        slot = tl.load(slot_of_row_ptr + row, mask=live, other=0).to(tl.int64)
        tl.store(out_ptr + slot, total.to(out_ptr.dtype.element_ty), mask=live)


def hidden_grad(
    grad_TD: Tensor,  # (T, D) gradient of the output, contiguous
    w_out_EDF: Tensor,  # (E, D, F), contiguous
    weights_TK: Tensor,  # routing weights, contiguous
    h_RH: Tensor,  # (R, G * F) from `moe_forward.up`
    rows: Rows,  # sorted rows, cut into tiles of config.block_m
    config: LaunchConfig,  # tile sizes
    *,
    inner: str,  # the point-wise function in the activation: silu, gelu, relu, relu2 or clamped_silu
    interleaved: bool,  # whether gate and up alternate in H
    need_a: bool,  # whether to compute A'
    need_h: bool,  # whether to compute dH
    need_weights: bool,  # whether to compute the partial sums for `routing_weight_grad`
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dO W_out with the backward of the activation in its epilogue.

    Returns:
        A' (R, F), dH like H, partial (column tiles, R) FP32; unneeded results are None. Rows behind the last live one
        are not written. Does not synchronise.
    """
    _, D, F = w_out_EDF.shape
    R, tile = rows.num_rows, config.hidden_grad
    a = torch.empty(R, F, dtype=h_RH.dtype, device=h_RH.device) if need_a else None
    d_h = torch.empty_like(h_RH) if need_h else None
    shape = (triton.cdiv(F, tile.block_n), R)
    partial = torch.empty(shape, dtype=torch.float32, device=h_RH.device) if need_weights else None
    if R == 0 or not (need_a or need_h or need_weights):
        return a, d_h, partial
    grid, options = row_options(config, tile, rows, F, D)
    G = h_RH.shape[1] // F if F else 1
    chunk = tile.chunk or HIDDEN_GRAD_CHUNK
    if interleaved or inner == "gelu":  # twice the columns in a row; more registers
        chunk = min(chunk, HIDDEN_GRAD_CHUNK // (1 + interleaved) // max(tile.block_n // 128, 1))
    units = min(tile.block_n, chunk)

    a_out: Any = a
    d_h_out: Any = d_h
    if options["RAGGED"] and a is not None:
        a_out = create_ragged_descriptor(a, [tile.block_m, units])
    if options["RAGGED"] and d_h is not None:
        d_h_out = hidden_descriptor(d_h, G, [tile.block_m, units], interleaved=interleaved)
    launch(
        _hidden_grad,
        grid,
        grad_TD,
        TensorDescriptor.from_tensor(w_out_EDF, [1, tile.block_k, tile.block_n]) if config.tma else w_out_EDF,
        weights_TK,
        h_RH,
        rows.token_of_row_N,
        rows.slot_of_row_N,
        rows.offsets_E,
        rows.tile_expert,
        rows.tile_row,
        rows.num_tiles,
        a_out,
        d_h_out,
        low(a, tile),
        low(d_h, tile),
        partial,
        R,
        F,
        D,
        G=G,
        INNER=inner,
        INTERLEAVED=interleaved,
        TMA=config.tma,
        FETCH=config.tma and tile.fetch and not config.interpreted,
        CHUNK_N=chunk,
        **options,
    )
    return a, d_h, partial


def routing_weight_grad(
    partial: Tensor,  # partial sums from `hidden_grad`
    grad_TD: Tensor,  # (T, D) gradient of the output, contiguous
    b_out_ED: Tensor | None,  # (E, D) or None
    weights_TK: Tensor,
    rows: Rows,  # sorted rows, cut into tiles of config.block_m
    config: LaunchConfig,  # tile sizes
) -> Tensor:
    """Compute the gradient of the routing weights, (T, K) in their dtype; 0 for dead slots. Does not synchronise."""
    out = torch.zeros(weights_TK.shape, dtype=weights_TK.dtype, device=weights_TK.device)
    launch(
        _routing_weight_grad,
        (rows.most_tiles if rows.num_rows else 0,),
        partial,
        grad_TD,
        b_out_ED,
        rows.token_of_row_N,
        rows.slot_of_row_N,
        rows.offsets_E,
        rows.tile_expert,
        rows.tile_row,
        rows.num_tiles,
        out,
        rows.num_rows,
        partial.shape[0],
        grad_TD.shape[1],
        BLOCK_M=config.block_m,
        BLOCK=_BIAS_COLUMNS,
        num_warps=4,
    )
    return out
