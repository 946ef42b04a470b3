"""Buffers of C rows per expert, padded with zeros: the layout of capacity-limited experts and padded exchanges.

Row c of expert e holds its c-th row in slot order; rows beyond the capacity are left out, in both directions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.combine import accumulator, row_tile
from expertmesh.kernels.launch import launch

_SLOT_BLOCK = 256


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _find_places(
    offsets_ptr,
    row_of_slot_ptr,
    place_ptr,
    num_slots,
    capacity,
    E: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """place[slot] = e * C + c, or E * C for slots without a place; e by binary search over the offsets."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = slot < num_slots
    row = tl.load(row_of_slot_ptr + slot, mask=real, other=0)
    low = tl.zeros(
        (BLOCK,), tl.int32
    )  # the answer is in [low, high): offsets[e] <= row < offsets[e + 1]
    high = low + E
    for _ in range(STEPS):
        middle = (low + high) // 2
        right = tl.load(offsets_ptr + middle, mask=real, other=0) <= row
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    c = row - tl.load(offsets_ptr + low, mask=real, other=0)
    kept = (row < tl.load(offsets_ptr + E)) & (c < capacity)
    tl.store(place_ptr + slot, tl.where(kept, low * capacity + c, E * capacity), mask=real)


@triton.jit(do_not_specialize=["num_rows", "num_places", "capacity"])
def _fill_places(
    x_ptr,
    weights_ptr,
    offsets_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    out_ptr,
    num_rows,
    num_places,
    capacity,
    D,
    ACCUMULATOR: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[e * C + c] = (weight *) x of the token of expert e's c-th row; 0 where there is none."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = place < num_places
    e = place // capacity
    row = tl.load(offsets_ptr + e, mask=real, other=0) + place % capacity
    live = real & (row < tl.load(offsets_ptr + e + 1, mask=real, other=0)) & (row < num_rows)
    token = tl.load(token_of_row_ptr + row, mask=live, other=0).to(tl.int64)
    columns = (d < D)[None, :]
    x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=live[:, None] & columns, other=0.0)
    if weights_ptr is not None:
        slot = tl.load(slot_of_row_ptr + row, mask=live, other=0).to(tl.int64)
        s = tl.load(weights_ptr + slot, mask=live, other=0.0).to(ACCUMULATOR)
        x = (x.to(ACCUMULATOR) * s[:, None]).to(x.dtype)
    tl.store(out_ptr + place[:, None] * D + d[None, :], x, mask=real[:, None] & columns)


def find_places(offsets_E: Tensor, row_of_slot_N: Tensor, capacity: int) -> Tensor:
    """Row of every slot in the buffers seen as (E * C, D); E * C for dead slots and those over capacity.

    Args:
        offsets_E: (E + 1,) int32.
        row_of_slot_N: (N,) int32.
        capacity: C >= 1, with E * C below 2**31.

    Returns:
        (N,) int32: what `sum_rows` takes for row_of_slot, with the bound E * C. Does not synchronise.
    """
    num_experts, num_slots = offsets_E.shape[0] - 1, row_of_slot_N.shape[0]
    places = torch.empty_like(row_of_slot_N)
    launch(
        _find_places,
        (triton.cdiv(num_slots, _SLOT_BLOCK),),
        offsets_E,
        row_of_slot_N,
        places,
        num_slots,
        capacity,
        E=num_experts,
        STEPS=(num_experts - 1).bit_length(),
        BLOCK=_SLOT_BLOCK,
        num_warps=4,
    )
    return places


def fill_places(
    x_TD: Tensor,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    capacity: int,
    weights_TK: Tensor | None = None,
) -> Tensor:
    """Copy tokens (T, D) to buffers (E, C, D), zeros where an expert has fewer than C rows.

    Args:
        x_TD: (T, D), any floating-point type.
        offsets_E: (E + 1,) int32.
        token_of_row_N: (R,) int32.
        slot_of_row_N: (R,) int32; read only with weights.
        capacity: C >= 1, with E * C below 2**31.
        weights_TK: (T, K) factors of the copies (the gradient of a weighted combine), or None.

    Returns:
        (E, C, D) in the type of x. Does not synchronise.
    """
    num_experts, dim = offsets_E.shape[0] - 1, x_TD.shape[1]
    num_places = num_experts * capacity
    out = torch.empty(num_experts, capacity, dim, dtype=x_TD.dtype, device=x_TD.device)
    block_c, block_d = row_tile(num_places, dim, x_TD.element_size())
    launch(
        _fill_places,
        (triton.cdiv(num_places, block_c), triton.cdiv(dim, block_d)),
        x_TD.contiguous(),
        None if weights_TK is None else weights_TK.contiguous(),
        offsets_E,
        token_of_row_N,
        slot_of_row_N,
        out,
        token_of_row_N.shape[0],
        num_places,
        capacity,
        dim,
        ACCUMULATOR=accumulator(x_TD.dtype),
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out
