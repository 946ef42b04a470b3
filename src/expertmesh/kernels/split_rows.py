"""Division of a weight gradient's sum over a very hot expert's rows among programs, without atomics.

A narrow layer has few tiles per expert. If one expert has most rows, a few programs would sum them all while the others
wait. Rows of experts with more than piece_rows rows are therefore cut into pieces. Every piece's sum goes to its own
place in an FP32 workspace, and a second kernel adds an expert's pieces in order. The workspace is bounded by the number
of programs, not by the layer: see `cut`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import launch, next_power_of_2

_ADD_BLOCK = 1024
_ALIGNED_LENGTH = 4
"""Alignment of the lists, as a number of int32 in 16 bytes."""


@triton.jit(do_not_specialize=["piece_rows"])
def _cut_pieces(
    offsets_ptr,
    start_ptr,
    end_ptr,
    expert_ptr,
    place_ptr,
    num_pieces_ptr,
    split_expert_ptr,
    split_place_ptr,
    split_count_ptr,
    num_split_ptr,
    piece_rows,
    E: tl.constexpr,
    BINS: tl.constexpr,
):
    """List the pieces: piece e < E is the first one of expert e, further pieces follow; one program."""
    e = tl.arange(0, BINS)
    inside = e < E
    start = tl.load(offsets_ptr + e, mask=inside, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=inside, other=0)
    count = tl.maximum(tl.cdiv(end - start, piece_rows), 1)
    split = count > 1
    places = tl.where(split, count, 0)
    place = tl.cumsum(places, 0) - places
    more = tl.where(inside, count - 1, 0)
    index = E - 1 + tl.cumsum(more, 0) - more
    for k in tl.range(0, tl.max(count, 0)):
        piece = tl.where(k == 0, e, index + k)
        used = inside & (k < count)
        first = start + k * piece_rows
        tl.store(start_ptr + piece, first, mask=used)
        tl.store(end_ptr + piece, tl.minimum(first + piece_rows, end), mask=used)
        tl.store(expert_ptr + piece, e, mask=used)
        tl.store(place_ptr + piece, tl.where(split, place + k, -1), mask=used)
    rank = tl.cumsum(split.to(tl.int32), 0) - 1
    tl.store(split_expert_ptr + rank, e, mask=split)
    tl.store(split_place_ptr + rank, place, mask=split)
    tl.store(split_count_ptr + rank, count, mask=split)
    tl.store(num_pieces_ptr, E + tl.sum(more, 0))
    tl.store(num_split_ptr, tl.sum(split.to(tl.int32), 0))


@triton.jit
def _add_pieces(
    work_ptr,
    split_expert_ptr,
    split_place_ptr,
    split_count_ptr,
    num_split_ptr,
    out_ptr,
    size,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[e] = the sum of expert e's pieces, first to last, for the split experts."""
    number = tl.program_id(0)
    if number < tl.load(num_split_ptr):
        e = tl.load(split_expert_ptr + number).to(tl.int64)
        place = tl.load(split_place_ptr + number).to(tl.int64)
        element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = element < size
        total = tl.zeros((BLOCK,), tl.float32)
        for k in tl.range(0, tl.load(split_count_ptr + number)):
            total += tl.load(work_ptr + (place + k) * size + element, mask=inside, other=0.0)
        out = out_ptr + e * size + element
        if ACCUMULATE:
            total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Pieces:
    """Pieces of rows that are summed separately, and the workspace for pieces of split experts."""

    start: Tensor  # first row of every piece, int32; E + most entries. Piece e < E belongs to expert e.
    end: Tensor  # last row + 1 of every piece
    expert: Tensor  # expert of every piece
    # index of the piece's sum in the workspace; -1 for an expert's only piece, whose sum goes to the gradient
    place: Tensor
    num_pieces: Tensor  # (1,) number of used pieces
    split_expert: Tensor  # experts with several pieces
    split_place: Tensor  # place of each split expert's first piece
    split_count: Tensor  # number of pieces of each split expert
    num_split: Tensor  # (1,) number of split experts
    work: Tensor  # (2 * most - 1, M, N) FP32 workspace


def rows_of_pieces(num_rows: int, most: int, fewest_rows: int, block_k: int) -> int:
    """Number of rows of a piece: num_rows / most, at least fewest_rows, a multiple of block_k."""
    return triton.cdiv(max(triton.cdiv(num_rows, most), fewest_rows), block_k) * block_k


def cut(offsets_E: Tensor, piece_rows: int, num_rows: int, M: int, N: int) -> Pieces:
    """Cut the experts' rows into pieces and allocate the workspace; one launch, no synchronisation.

    With S = ceil(num_rows / piece_rows), fewer than S experts have more than piece_rows rows, and they need at most
    2 S - 1 places: rows / piece_rows each, rounded up.
    """
    num_experts = offsets_E.shape[0] - 1
    most = triton.cdiv(num_rows, piece_rows)
    sizes = [num_experts + most] * 4 + [1] + [most] * 3 + [1]
    # each list begins at a multiple of 16 bytes: Triton compiles again if an argument's alignment changes
    room = [triton.cdiv(size, _ALIGNED_LENGTH) * _ALIGNED_LENGTH for size in sizes]
    memory = torch.empty(sum(room), dtype=torch.int32, device=offsets_E.device)
    lists = [part[:size] for part, size in zip(memory.split(room), sizes, strict=True)]
    start, end, expert, place, num_pieces, *split = lists
    launch(
        _cut_pieces,
        (1,),
        offsets_E,
        start,
        end,
        expert,
        place,
        num_pieces,
        *split,
        piece_rows,
        E=num_experts,
        BINS=next_power_of_2(num_experts),
        num_warps=4,
    )
    work = torch.empty(2 * most - 1, M, N, dtype=torch.float32, device=offsets_E.device)
    return Pieces(start, end, expert, place, num_pieces, split[0], split[1], split[2], split[3], work)


def add(pieces: Pieces, out: Tensor, *, accumulate: bool) -> None:
    """Write or add the sums of the split experts' pieces to their gradients; does not synchronise.

    Args:
        pieces: result of `cut`, with the workspace filled.
        out: (E, M, N) contiguous, any floating-point dtype.
        accumulate: add to `out` instead.
    """
    size = out.shape[1] * out.shape[2]
    launch(
        _add_pieces,
        (pieces.split_expert.shape[0], triton.cdiv(size, _ADD_BLOCK)),
        pieces.work,
        pieces.split_expert,
        pieces.split_place,
        pieces.split_count,
        pieces.num_split,
        out,
        size,
        ACCUMULATE=accumulate,
        BLOCK=_ADD_BLOCK,
        num_warps=4,
    )
