"""Stable order of slots by expert, and the tile table of the grouped GEMMs, without atomics and host synchronisation.

The order is a counting sort over tiles of slots: `_count_tile` (slots of each expert per tile), `_prefix_tiles`
(exclusive prefix over the tiles, one program per expert), `_place_tile` (order inside a tile, then row = rows of
smaller experts + rows of the expert in earlier tiles + rank). A single tile needs one launch, because its sorted order
is the row order. Ids outside 0..E count as E, "no expert", the last bin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import launch, next_power_of_2

MAX_EXPERTS = 2047
"""Maximum number of experts: a program holds one counter per expert, and one for dead slots, in registers."""
TILE = 1024
"""Slots per program; a sort key, expert * TILE + slot in tile, stays far below 2**31."""
_MIN_BINS = 64  # tl.histogram needs at least as many bins as a warp has threads
_PREFIX_BLOCK = 1024
_FILL_BLOCK = 128


@triton.jit
def _load_ids(ids_ptr, slot, num_slots, E: tl.constexpr):
    """Load expert ids as int32; E for ids out of range and for lanes behind the end, which thus sort last."""
    ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=E)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _count_tile(
    ids_ptr,
    counts_ptr,
    num_slots,
    num_tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute counts[e, tile] = number of slots of expert e in the tile."""
    tile = tl.program_id(0).to(tl.int64)
    slot = tile * TILE + tl.arange(0, TILE)
    ids = _load_ids(ids_ptr, slot, num_slots, E)
    counts = tl.histogram(ids, BINS, mask=slot < num_slots)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins.to(tl.int64) * num_tiles + tile, counts, mask=bins <= E)


@triton.jit(do_not_specialize=["num_tiles"])
def _prefix_tiles(counts_ptr, totals_ptr, num_tiles, BLOCK: tl.constexpr):
    """Replace row e of counts by its exclusive prefix sum; totals[e] is its sum."""
    e = tl.program_id(0).to(tl.int64)
    carry = tl.zeros((), tl.int32)
    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        pointers = counts_ptr + e * num_tiles + tile
        counts = tl.load(pointers, mask=tile < num_tiles, other=0)
        before = tl.cumsum(counts, 0) - counts + carry
        tl.store(pointers, before, mask=tile < num_tiles)
        carry += tl.sum(counts, 0)
    tl.store(totals_ptr + e, carry)


@triton.jit
def _sort_tile(ids, TILE: tl.constexpr):
    """Sort a tile stably: (ids, position in the tile), both by rank."""
    keys = tl.sort(ids * TILE + tl.arange(0, TILE))
    return keys // TILE, keys % TILE


@triton.jit
def _store_rows(
    slot,
    row,
    num_slots,
    num_rows,
    token_of_row_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    K: tl.constexpr,
):
    real = slot < num_slots
    kept = real & (row < num_rows)
    tl.store(row_of_slot_ptr + slot, row, mask=real)
    tl.store(slot_of_row_ptr + row, slot.to(tl.int32), mask=kept)
    tl.store(token_of_row_ptr + row, (slot // K).to(tl.int32), mask=kept)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_tiles"])
def _place_tile(
    ids_ptr,
    before_ptr,
    totals_ptr,
    offsets_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    num_slots,
    num_rows,
    num_tiles,
    K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the rows of a tile's slots; the first program also stores the offsets."""
    tile = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    totals = tl.load(totals_ptr + bins, mask=bins <= E, other=0)
    offsets = tl.cumsum(totals, 0) - totals
    if tile == 0:
        tl.store(offsets_ptr + bins, offsets, mask=bins <= E)

    lane = tl.arange(0, TILE)
    ids = _load_ids(ids_ptr, tile * TILE + lane, num_slots, E)
    counts = tl.histogram(ids, BINS)
    smaller = tl.cumsum(counts, 0) - counts
    before = tl.load(before_ptr + bins.to(tl.int64) * num_tiles + tile, mask=bins <= E, other=0)
    expert, position = _sort_tile(ids, TILE)
    row = tl.gather(offsets + before - smaller, expert, 0) + lane
    _store_rows(
        tile * TILE + position,
        row,
        num_slots,
        num_rows,
        token_of_row_ptr,
        slot_of_row_ptr,
        row_of_slot_ptr,
        K,
    )


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def _place_all(
    ids_ptr,
    offsets_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    num_slots,
    num_rows,
    K: tl.constexpr,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute all maps in one program, for at most TILE slots (decoding)."""
    lane = tl.arange(0, TILE)
    ids = _load_ids(ids_ptr, lane.to(tl.int64), num_slots, E)
    counts = tl.histogram(ids, BINS)
    bins = tl.arange(0, BINS)
    tl.store(offsets_ptr + bins, tl.cumsum(counts, 0) - counts, mask=bins <= E)
    _, position = _sort_tile(ids, TILE)
    _store_rows(
        position.to(tl.int64),
        lane,
        num_slots,
        num_rows,
        token_of_row_ptr,
        slot_of_row_ptr,
        row_of_slot_ptr,
        K,
    )


@triton.jit(do_not_specialize=["max_tiles"])
def _fill_tile_table(
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    max_tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the tiles of expert e in program e; program E stores the number of tiles and marks unused entries."""
    e = tl.program_id(0)
    bins = tl.arange(0, BINS)
    first = tl.load(offsets_ptr + bins, mask=bins < E, other=0)
    last = tl.load(offsets_ptr + bins + 1, mask=bins < E, other=0)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(bins < e, tiles, 0), 0)
    count = tl.sum(tl.where(bins == e, tiles, 0), 0)
    row = tl.load(offsets_ptr + e)
    step = BLOCK_M
    if e == E:
        tl.store(num_tiles_ptr, start)
        count = max_tiles - start
        step = 0
    for i in range(0, count, BLOCK):
        tile = i + tl.arange(0, BLOCK)
        mask = (tile < count) & (start + tile < max_tiles)
        index = (start + tile).to(tl.int64)
        tl.store(tile_expert_ptr + index, e + tl.zeros_like(tile), mask=mask)
        tl.store(tile_row_ptr + index, row + tile * step, mask=mask)


def route_metadata(
    expert_ids_TK: Tensor, num_experts: int, num_rows: int, *, tile: int = TILE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the tensors of `ops.RouteMetadata`; one launch for up to `tile` slots, else three.

    Args:
        expert_ids_TK: (T, K) int32 or int64; E and ids out of range mean "no expert".
        num_experts: E, up to MAX_EXPERTS.
        num_rows: R, the length of the row maps; at least the number of live slots, at most T * K.
        tile: slots per program, a power of two.

    Returns:
        offsets (E + 1,), token_of_row (R,), slot_of_row (R,), row_of_slot (T * K,), int32. Does not synchronise.
    """
    ids_N = expert_ids_TK.reshape(-1).contiguous()
    top_k, num_slots, E = max(expert_ids_TK.shape[1], 1), ids_N.shape[0], num_experts

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids_N.device)

    offsets, token_of_row, slot_of_row, row_of_slot = (empty(n) for n in (E + 1, num_rows, num_rows, num_slots))
    rows = (token_of_row, slot_of_row, row_of_slot)
    sizes = {"E": E, "BINS": max(next_power_of_2(E + 1), _MIN_BINS)}
    sizes["num_warps"] = 8 if sizes["BINS"] > TILE else 4
    if num_slots <= tile:
        used = {"TILE": max(next_power_of_2(num_slots), _MIN_BINS), "K": top_k, **sizes}
        launch(_place_all, (1,), ids_N, offsets, *rows, num_slots, num_rows, **used)
        return offsets, *rows
    num_tiles = triton.cdiv(num_slots, tile)
    counts, totals = empty(E + 1, num_tiles), empty(E + 1)
    launch(_count_tile, (num_tiles,), ids_N, counts, num_slots, num_tiles, TILE=tile, **sizes)
    launch(_prefix_tiles, (E + 1,), counts, totals, num_tiles, BLOCK=_PREFIX_BLOCK, num_warps=4)
    maps = (ids_N, counts, totals, offsets, *rows)
    launch(
        _place_tile,
        (num_tiles,),
        *maps,
        num_slots,
        num_rows,
        num_tiles,
        K=top_k,
        TILE=tile,
        **sizes,
    )
    return offsets, *rows


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Upper bound on the number of tiles of block_m rows for num_rows rows of num_experts experts, without their
    counts."""
    return num_rows // block_m + min(num_experts, num_rows)


def tile_table(offsets_E: Tensor, num_rows: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut every expert's rows into tiles of block_m rows, expert after expert; one launch, no synchronisation.

    Args:
        offsets_E: (E + 1,) int32, as in `ops.RouteMetadata`, E up to MAX_EXPERTS.
        block_m: rows per tile; an expert's last tile may have fewer.

    Returns:
        tile_expert and tile_row, both (max_tiles(R, E, block_m),) int32: the expert and the first row of each tile;
        num_tiles (1,) int32: the number of used tiles. Unused tiles have expert E and row offsets[E], so no rows.
    """
    num_experts = offsets_E.shape[0] - 1
    bound = max_tiles(num_rows, num_experts, block_m)
    tile_expert = torch.empty(bound, dtype=torch.int32, device=offsets_E.device)
    tile_row = torch.empty_like(tile_expert)
    num_tiles = torch.empty(1, dtype=torch.int32, device=offsets_E.device)
    launch(
        _fill_tile_table,
        (num_experts + 1,),
        offsets_E,
        tile_expert,
        tile_row,
        num_tiles,
        bound,
        E=num_experts,
        BINS=next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK=_FILL_BLOCK,
        num_warps=1,
    )
    return tile_expert, tile_row, num_tiles
