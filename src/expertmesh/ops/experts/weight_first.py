"""Experts on a CPU with AMX without gradients, as products with the weight as the left factor.

Before oneDNN multiplies, it rearranges the right factor for AMX's tiles, and reads the left factor as it is stored. In
x W^T the right factor is the weight, whose rearranging takes as long as reading it; in W x^T it is a few tokens. The
steps are the general forward's, on transposed matrices and on many experts per call.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from expertmesh.ops.activation import inner_name, num_branches, pointwise_, second_branch
from expertmesh.ops.cpu import compiled_passes
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata

FEWEST_CHOICES = 2
"""Fewest choices per expert; with fewer, each choice's weights are read as fast by itself."""
FEWEST_WEIGHTS = 1 << 20
"""Fewest elements of w_in; smaller ones stay in the caches, and calls take longer than products."""
MOST_ELEMENTS = 1 << 21
"""Maximum number of elements of H of one call, unless an expert has more."""
_TILE = 32
"""Multiple of D and of F: oneDNN reads the left factor in pieces of so many elements."""
_COLUMNS = 16
"""Columns of a tile; up to so many rows of an expert take the time of one."""
_MOST_PADDING = 1.5
"""Maximum ratio of places to rows of a call on several experts, where fewer than `_COLUMNS` rows count as so many."""
_FEWEST_LIVE = 2 / 3
"""Minimum share of experts with rows in a call on several experts."""


def serves(c: ExpertsCall) -> bool:
    """Whether `forward` may compute a call, and is faster than the other backends."""
    experts, ids_TK = c.experts, c.ids_TK
    if c.maps is not None or ids_TK is None or c.batch_invariant or c.has_adapters:
        return False
    if not experts.is_whole or "weight_first" not in FORMATS[experts.format].backends:
        return False
    w_in, w_out = experts.w_in[0], experts.w_out[0]
    return (
        # first, because a compiler would guard on the sizes below
        runs_plainly(c.x_TD, c.weights_TK, w_in, w_out)
        and has_tiles()
        and c.x_TD.dtype == w_in.dtype == w_out.dtype == torch.bfloat16
        and not experts.b_in
        and experts.b_out is None
        and c.backend in ("auto", "torch")
        and ids_TK.shape == c.weights_TK.shape
        and ids_TK.numel() >= FEWEST_CHOICES * len(w_in)
        and w_in.numel() >= FEWEST_WEIGHTS
        and c.x_TD.shape[-1] == w_in.shape[3]
        and w_in.shape[2] % _TILE == w_in.shape[3] % _TILE == 0
        and w_in.is_contiguous()
        and w_out.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def has_tiles() -> bool:
    """Whether products of BF16 matrices run on AMX's tiles."""
    return torch.cpu._is_amx_tile_supported() and torch.backends.mkldnn.is_available()


def forward(c: ExpertsCall, _: list[Tensor]) -> Tensor:
    """Compute y (T, D) of a call that `serves` accepts.

    Raises:
        ConfigError: an id is out of range.
    """
    assert c.ids_TK is not None
    experts, top_k = c.experts, c.ids_TK.shape[1]
    w_in_EHD, w_out_EDF = experts.w_in[0].flatten(1, 2), experts.w_out[0]
    maps = route_metadata(c.ids_TK, len(w_out_EDF), backend=c.backend)
    places = _Places.of(maps, w_in_EHD.shape[1])
    y_PD = c.x_TD.new_empty(places.num + 1, c.x_TD.shape[1])
    y_PD[-1] = 0.0  # a dead slot's
    x_PD = c.x_TD.index_select(0, maps.token_of_row_N.index_select(0, places.row_of_place_P))
    slot_P = maps.slot_of_row_N.index_select(0, places.row_of_place_P)
    s_P = c.weights_TK.flatten().index_select(0, slot_P).float()
    passes = _Passes(experts.activation, num_elements=places.num * w_out_EDF.shape[2])
    for block in places.blocks:
        x_EMD, y_EMD, s_EM = (block.of(values) for values in (x_PD, y_PD, s_P))
        h_EHM = torch.bmm(w_in_EHD[block.experts], x_EMD.mT)
        a_EFM = passes.forward(h_EHM, s_EM)
        y_EMD.copy_(torch.bmm(w_out_EDF[block.experts], a_EFM).mT)
    # an embedding bag sums each token's rows in FP32, in one pass
    starts_T = torch.arange(0, c.ids_TK.numel(), top_k, dtype=torch.int32, device="cpu")
    return embedding_bag(places.place_of_slot_N, y_PD, starts_T, mode="sum")


@dataclass(frozen=True)
class _Block:
    """Neighbouring experts, of which each has the same number of places.

    Attributes:
        experts: the experts.
        first: first place.
        size: M, places of an expert.
    """

    experts: slice
    first: int
    size: int

    def of(self, values_P: Tensor) -> Tensor:
        """View of the block's values (E, M, ...)."""
        num = self.experts.stop - self.experts.start
        here = values_P[self.first : self.first + num * self.size]
        return here.unflatten(0, (num, self.size))


@dataclass(frozen=True)
class _Places:
    """Rows with padding, in blocks of experts of equal numbers of rows; padding repeats rows.

    Attributes:
        blocks: the blocks, in the order of their places.
        num: P, number of places.
        row_of_place_P: (P,) int32 row of each place.
        place_of_slot_N: (N,) int32 place of each slot; P for a dead one.
    """

    blocks: list[_Block]
    num: int
    row_of_place_P: Tensor
    place_of_slot_N: Tensor

    @staticmethod
    def of(maps: RouteMetadata, width: int) -> "_Places":
        """Make the blocks of experts whose H has `width` columns."""
        bounds: list[int] = maps.offsets_E.tolist()
        counts = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
        blocks = list(_blocks(counts, width))
        sizes = [0] * len(counts)
        for block in blocks:
            sizes[block.experts] = [block.size] * (block.experts.stop - block.experts.start)
        ends = list(accumulate(sizes))
        num, live = (ends or [0])[-1], bounds[-1]
        firsts = [end - size for end, size in zip(ends, sizes, strict=True)]
        shifts_E = torch.tensor(firsts, dtype=torch.int32, device="cpu") - maps.offsets_E[:-1]
        sizes_E, counts_E = torch.tensor([sizes, counts], dtype=torch.int32, device="cpu")
        row_P = torch.arange(num, dtype=torch.int32, device="cpu")
        row_P -= shifts_E.repeat_interleave(sizes_E, output_size=num)
        place_R = torch.arange(live, dtype=torch.int32, device="cpu")
        place_R += shifts_E.repeat_interleave(counts_E, output_size=live)
        # rows behind the last live one belong to dead slots
        place_N = pad(place_R, (0, len(maps.row_of_slot_N) - live), value=num)
        place_of_slot_N = place_N.index_select(0, maps.row_of_slot_N)
        return _Places(blocks, num, row_P.clamp_(0, max(live - 1, 0)), place_of_slot_N)


def _blocks(counts: list[int], width: int) -> Iterator[_Block]:
    """Blocks of experts: several where little is padded, else one; none without rows.

    Args:
        counts: number of rows of each expert.
        width: columns of H.
    """
    mean = max(sum(counts) // len(counts), _COLUMNS)
    at_once = min(len(counts), 1 << max(MOST_ELEMENTS // (width * mean), 1).bit_length() - 1)
    place = 0
    for first in range(0, len(counts), at_once):
        here = counts[first : first + at_once]
        size = _rounded(max(here))
        most = _MOST_PADDING * sum(max(count, _COLUMNS) for count in here)
        num_live = sum(count > 0 for count in here)
        are_together = size * len(here) <= most and num_live >= _FEWEST_LIVE * len(here)
        step = len(here) if are_together else 1
        for e in range(first, first + len(here), step):
            if size := _rounded(max(counts[e : e + step])):
                yield _Block(slice(e, e + step), place, size)
                place += step * size


def _rounded(num_rows: int) -> int:
    """Round a number of rows up, so that few shapes occur: oneDNN generates code for every new shape."""
    step = 4 if num_rows <= _COLUMNS else _COLUMNS
    step = max(step, (1 << max(num_rows, 1).bit_length() - 1) // 8)
    return -(-num_rows // step) * step


@dataclass(frozen=True)
class _Passes:
    """Activation of transposed rows, times their routing weights.

    Attributes:
        activation: name of the activation.
        num_elements: elements of A of the whole call.
    """

    activation: str
    num_elements: int

    def forward(self, h_EHM: Tensor, s_EM: Tensor) -> Tensor:
        """Compute s * act(h), (E, F, M), in FP32, rounded once."""
        if self.num_elements >= compiled_passes.SMALLEST:
            loop = compiled_passes.columns_loop(self.activation, h_EHM.dtype)
            if loop.run is not None:
                return loop(h_EHM, s_EM)[0]
        inner = inner_name(self.activation)
        gate, *up = h_EHM.chunk(num_branches(self.activation), 1)
        act = pointwise_(gate.float(), inner)
        for branch in up:
            act.mul_(second_branch(branch.float(), inner))
        return act.mul_(s_EM[:, None]).to(h_EHM.dtype)
