"""Gradients of the experts' hidden rows and of the routing weights.

G = gather(dO) W_out, and in its epilogue, from the saved H: A' = s * act(H) for the gradient of W_out, dH, and per
row and column tile the partial sum of G * act(H). `routing_weight_grad` adds these in a fixed order: the gradient of
the routing weight by <dO, A W_out^T> = <dO W_out, A>, without Y and without atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.grouped import (
    INNER,
    Rows,
    activate,
    descriptor,
    load_branches,
    product,
    row_weights,
    slope,
    store_branches,
    tile_place,
    tile_rows,
)
from expertmesh.kernels.launch import launch
from expertmesh.kernels.moe_forward import RowOptions
from expertmesh.kernels.tiles import Plan

_BIAS_COLUMNS = 64
_CHUNK_ELEMENTS = 32
"""Elements of H in a row that the activation's backward holds at once; more do not fit the registers."""


@triton.jit
def _through_activation(
    grad,
    s,
    row,
    live,
    n,
    F,
    h_ptr,
    a_ptr,
    d_h_ptr,
    G: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """Write A' and dH of a tile; give the sum of grad * act(H) per row. By halves down to CHUNK_N columns.

    A tile as wide as the product needs it would not leave registers for H and the gradients.
    """
    if BLOCK_N > CHUNK_N:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = grad.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        partial = _through_activation(
            left, s, row, live, n, F, h_ptr, a_ptr, d_h_ptr,
            G, INNER, INTERLEAVED, BLOCK_M, HALF, CHUNK_N,
        )  # fmt: skip
        return partial + _through_activation(
            right, s, row, live, n + HALF, F, h_ptr, a_ptr, d_h_ptr,
            G, INNER, INTERLEAVED, BLOCK_M, HALF, CHUNK_N,
        )  # fmt: skip
    f = n + tl.arange(0, BLOCK_N)
    mask = live[:, None] & (f < F)[None, :]
    dtype = h_ptr.dtype.element_ty
    place = row[:, None] * F + f[None, :]
    if G == 2:
        gate, up = load_branches(h_ptr, row, live, n, F, INTERLEAVED, BLOCK_N)
    else:
        gate = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)
    act = activate(gate, INNER)
    a = act * up if G == 2 else act
    # columns behind F: grad is 0 there, and so is act of the zeros loaded for H
    partial = tl.sum(grad * a, 1)
    if a_ptr is not None:
        tl.store(a_ptr + place, (a * s[:, None]).to(dtype), mask=mask)
    if d_h_ptr is not None:
        grad *= s[:, None]
        if G == 2:
            d_gate = (grad * up * slope(gate, INNER)).to(dtype)
            d_up = (grad * act).to(dtype)
            store_branches(d_h_ptr, d_gate, d_up, row, live, n, F, INTERLEAVED, BLOCK_N)
        else:
            tl.store(d_h_ptr + place, (grad * slope(gate, INNER)).to(dtype), mask=mask)
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
    a_ptr,
    d_h_ptr,
    partial_ptr,
    num_rows,
    F,
    D,
    G: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TMA: tl.constexpr,
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
    """A', dH and partial[tile_n, row] of all rows; a_ptr, d_h_ptr or partial_ptr may be None."""
    num_m = tl.load(num_tiles_ptr)
    num_n = tl.cdiv(F, BLOCK_N)
    D64 = tl.cast(D, tl.int64)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m, tile_n = tile_place(tile, num_m, num_n, GROUP_M)
        e, first, row, live = tile_rows(m, tile_expert_ptr, tile_row_ptr, offsets_ptr, BLOCK_M)
        n = tile_n * BLOCK_N
        token = tl.load(token_of_row_ptr + tl.where(live, row, first)).to(tl.int64)
        grad = product(
            grad_ptr,
            w,
            token,
            first,
            e,
            n,
            F,
            D,
            D64 * F,
            tl.cast(F, tl.int64),
            0,
            1,
            False,
            False,
            TMA,
            EVEN_N,
            EVEN_K,
            UPCAST,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        s = row_weights(weights_ptr, slot_of_row_ptr, row, live)
        partial = _through_activation(
            grad,
            s,
            row,
            live,
            n,
            F,
            h_ptr,
            a_ptr,
            d_h_ptr,
            G,
            INNER,
            INTERLEAVED,
            BLOCK_M,
            BLOCK_N,
            CHUNK_N,
        )
        if partial_ptr is not None:
            tl.store(partial_ptr + tile_n.to(tl.int64) * num_rows + row, partial, mask=live)


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
    """out[slot of row] = sum of the row's partials (+ dO . b_out)."""
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles_ptr):
        e, first, row, live = tile_rows(tile, tile_expert_ptr, tile_row_ptr, offsets_ptr, BLOCK_M)
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
    grad_TD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    h_RH: Tensor,
    rows: Rows,
    plan: Plan,
    *,
    activation: str,
    interleaved: bool,
    need_a: bool,
    need_h: bool,
    need_weights: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dO W_out with the backward of the activation in its epilogue.

    Args:
        grad_TD: (T, D) gradient of the output, contiguous.
        w_out_EDF: (E, D, F), contiguous.
        weights_TK: routing weights, contiguous.
        h_RH: (R, G * F) from `moe_forward.up`.
        rows: sorted rows, cut in tiles of plan.block_m.
        plan: tile sizes.
        activation: a name of `ops.activation`.
        interleaved: whether gate and up alternate in H.
        need_a: whether A' is wanted.
        need_h: whether dH is wanted.
        need_weights: whether the partial sums for `routing_weight_grad` are wanted.

    Returns:
        A' (R, F), dH like H, partial (column tiles, R) FP32; None for what is not wanted. Rows behind the last live one
        are not written. Does not synchronise.
    """
    _, D, F = w_out_EDF.shape
    R, tile = rows.num_rows, plan.hidden_grad
    a = torch.empty(R, F, dtype=h_RH.dtype, device=h_RH.device) if need_a else None
    d_h = torch.empty_like(h_RH) if need_h else None
    shape = (triton.cdiv(F, tile.block_n), R)
    partial = torch.empty(shape, dtype=torch.float32, device=h_RH.device) if need_weights else None
    if R == 0 or not (need_a or need_h or need_weights):
        return a, d_h, partial
    options = RowOptions.of(plan, tile, rows, F, D)
    launch(
        _hidden_grad,
        (options.num_programs,),
        grad_TD,
        descriptor(w_out_EDF, [1, tile.block_k, tile.block_n]) if plan.tma else w_out_EDF,
        weights_TK,
        h_RH,
        rows.token_of_row_N,
        rows.slot_of_row_N,
        rows.offsets_E,
        rows.tile_expert,
        rows.tile_row,
        rows.num_tiles,
        a,
        d_h,
        partial,
        R,
        F,
        D,
        G=h_RH.shape[1] // F if F else 1,
        INNER=INNER[activation],
        INTERLEAVED=interleaved,
        TMA=plan.tma,
        CHUNK_N=_CHUNK_ELEMENTS // 2 if interleaved else _CHUNK_ELEMENTS,
        **options.constants(),
    )
    return a, d_h, partial


def routing_weight_grad(
    partial: Tensor,
    grad_TD: Tensor,
    b_out_ED: Tensor | None,
    weights_TK: Tensor,
    rows: Rows,
    plan: Plan,
) -> Tensor:
    """Gradient of the routing weights, (T, K) in their type; 0 for slots without expert. Does not synchronise.

    Args:
        partial: from `hidden_grad`.
        grad_TD: (T, D) gradient of the output, contiguous.
        b_out_ED: (E, D) or None.
        weights_TK: the routing weights.
        rows: sorted rows, cut in tiles of plan.block_m.
        plan: tile sizes.
    """
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
        BLOCK_M=plan.block_m,
        BLOCK=_BIAS_COLUMNS,
        num_warps=4,
    )
    return out
