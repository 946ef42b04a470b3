"""How tokens reach the ranks of their experts and come home: `Alone`, `AllReduceExchange`, `Fixed` and `Ragged`.

An exchange starts and finishes two moves, out (`start`, `DispatchHandle.finish`) and home (`DispatchHandle.start_home`, `CombineHandle.finish`).
What runs between a start and its finish hides the travel, in the backward too. A start never waits for another rank.

A token goes once to each rank that holds an expert of its choice (once to each slice of one, where experts are
sliced), with its ids and weights; the rank returns one partial sum for it. Capacity and drops are settled before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from expertmesh.comm.all_to_all.flat import Counts, CountsInFlight, in_flight_all_to_all
from expertmesh.comm.async_collective import AsyncTensor
from expertmesh.comm.collectives import in_flight_all_gather
from expertmesh.comm.group import RankGroup
from expertmesh.config.dispatch_options import DispatchDtype
from expertmesh.errors import ConfigError
from expertmesh.moe.assignment import count_all_choices
from expertmesh.moe.dispatch import Dispatched
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata
from expertmesh.parallel.experts.route_split import RouteSplit
from expertmesh.parallel.experts.tables import on_device


@dataclass(frozen=True)
class Route:
    """The ranks that one split lets tokens travel over.

    Attributes:
        split: the split that the route serves.
        group: ranks that share their tokens.
        num_experts: E.
        first_expert: global id of the first expert that this rank computes.
        places: rank in the group of [block of experts][slice].
        layer: name for errors and the byte counter.
        payload: how tokens travel out.
    """

    split: RouteSplit
    group: RankGroup
    num_experts: int
    first_expert: int
    places: list[list[int]]
    layer: str
    payload: DispatchDtype = "same"

    @property
    def num_local(self) -> int:
        """Experts that this rank computes."""
        return self.num_experts // self.split.route_e

    def blocks(self, ids_TK: Tensor) -> Tensor:
        """The block of experts of each choice; `split.route_e` for no choice."""
        return torch.where(ids_TK < self.num_experts, ids_TK // self.num_local, self.split.route_e)

    def local_ids(self, ids_RK: Tensor, first: int | Tensor) -> tuple[Tensor, Tensor]:
        """Ids counted from a rank's first expert, `num_local` for those of other ranks; and which are the rank's own."""
        local_RK = ids_RK - first
        own_RK = (local_RK >= 0) & (local_RK < self.num_local)
        return torch.where(own_RK, local_RK, self.num_local), own_RK

    def own(self, tokens: Dispatched) -> Dispatched:
        """Tokens with ids counted from this rank's first expert; choices of other ranks' experts are none here."""
        local_RK, own_RK = self.local_ids(tokens.expert_ids_TK, self.first_expert)
        return replace(tokens, expert_ids_TK=local_RK, weights_TK=tokens.weights_TK * own_RK)

    def send(
        self, both_RK: Tensor, x_RD: Tensor, counts: Counts, group: RankGroup, purpose: str
    ) -> tuple[AsyncTensor, AsyncTensor]:
        """Send rows out, and what `choices_of_rows` gave them, which is not rounded."""
        where = f"{self.layer}, {purpose}"
        both = in_flight_all_to_all(both_RK, counts, group, where=where)
        x = in_flight_all_to_all(x_RD, counts, group, where=where, payload=self.payload)
        return both, x

    def arrived(self, both_RK: Tensor, x_RD: Tensor, max_rows: int | None = None) -> Dispatched:
        """Rows of other ranks with what `choices_of_rows` gave them, as this rank's `own`."""
        weights_RK, ids_RK = both_RK.tensor_split(2, 1)
        return self.own(Dispatched(x_RD, ids_RK.detach().to(torch.int64), weights_RK, max_rows))


class CombineHandle(Protocol):
    """Partial sums on their way home: the second half of an exchange (combine)."""

    def advance(self) -> None:
        """Send on what waits at a rank between; `finish` does it if nobody did."""

    def finish(self) -> Tensor:
        """Wait for them and add them per token, in FP32 (FP64 for FP64) and a fixed order; (T, D)."""


class DispatchHandle(ABC):
    """Tokens on their way to their experts: the first half of an exchange (dispatch)."""

    travels = True
    """Whether there is a way that something could hide."""

    @abstractmethod
    def advance(self) -> None:
        """Send what had to wait for numbers of other ranks, and wait for these; `finish` does it if nobody did."""

    @abstractmethod
    def finish(self) -> Dispatched:
        """Wait for the tokens of all ranks; their ids are local then.

        Raises:
            CollectiveError: a rank is gone or late.
        """

    @abstractmethod
    def start_home(self, y_RD: Tensor) -> CombineHandle:
        """Send a partial sum for each token that arrived back to where it came from."""


Outbound = DispatchHandle
"""Its former name, which exchanges of one's own may import."""


class Exchange:
    """Moves tokens over the ranks of one route. Every rank of it must call, in the same order. An heir has `start` or `start_parts`.

    Args:
        route: of the tokens.
    """

    def __init__(self, route: Route) -> None:
        self.route = route

    def start(self, tokens: Dispatched) -> DispatchHandle:
        """Send tokens out; returns without waiting for other ranks.

        Args:
            tokens: of this rank, with global ids.
        """
        return self.start_parts(tokens, 1)[0]

    def start_parts(
        self, tokens: Dispatched, num_parts: int, num_pieces: int = 1
    ) -> Sequence[DispatchHandle]:
        """Send tokens out in parts that travel one by one.

        Args:
            tokens: of this rank, with global ids; some parts may have none.
            num_parts: the same on all ranks.
            num_pieces: in which a part goes where its way has several stages, so that these overlap; the same on all
                ranks.

        Returns:
            One for each part, in the order of the tokens; fewer where nothing travels.
        """
        return [self.start(part) for part in split(tokens, part_sizes(tokens, num_parts))]


def part_sizes(tokens: Dispatched, num_parts: int) -> list[int]:
    """Sizes of parts of some tokens, equal but for one token."""
    T = len(tokens.x_TD)
    return [T * (i + 1) // num_parts - T * i // num_parts for i in range(num_parts)]


def split(tokens: Dispatched, sizes: Sequence[int]) -> list[Dispatched]:
    """Cut tokens into consecutive parts of these sizes, differentiably."""
    if len(sizes) == 1:
        return [tokens]
    columns = (tokens.x_TD, tokens.expert_ids_TK, tokens.weights_TK)
    parts = zip(*(column.split(list(sizes)) for column in columns), strict=True)
    return [Dispatched(x_TD, ids, weights, tokens.max_rows) for x_TD, ids, weights in parts]


@dataclass(frozen=True)
class _Summed:
    """Rows on their way home, and how they are added."""

    rows: AsyncTensor
    add: Callable[[Tensor], Tensor]

    def advance(self) -> None:
        """All is under way."""

    def finish(self) -> Tensor:
        return self.add(self.rows.finish())


@dataclass(frozen=True)
class _LocalCombine:
    y_TD: Tensor

    def advance(self) -> None:
        """Nothing is under way."""

    def finish(self) -> Tensor:
        return self.y_TD


class _LocalDispatch(DispatchHandle):
    travels = False

    def __init__(self, tokens: Dispatched) -> None:
        self._tokens = tokens

    def advance(self) -> None:
        """Nothing is under way."""

    def finish(self) -> Dispatched:
        return self._tokens

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        return _LocalCombine(y_RD)


class Alone(Exchange):
    """This rank has all experts of its tokens: nothing moves."""

    def start_parts(
        self, tokens: Dispatched, num_parts: int, num_pieces: int = 1
    ) -> Sequence[DispatchHandle]:
        """Keep the tokens, together."""
        return [_LocalDispatch(tokens)]


class AllReduceExchange(Exchange):
    """Every rank has the same tokens: each computes what its experts, or its slices of them, give to all, and every rank adds up all.

    For inference: one exchange per layer, nothing that a host would wait for, and the same bits on all ranks.
    """

    def start_parts(
        self, tokens: Dispatched, num_parts: int, num_pieces: int = 1
    ) -> Sequence[DispatchHandle]:
        """Keep the tokens, together.

        Raises:
            ConfigError: gradients would be asked for, which came out once for every rank.
        """
        if torch.is_grad_enabled() and (
            tokens.x_TD.requires_grad or tokens.weights_TK.requires_grad
        ):
            raise ConfigError(
                f"{self.route.layer}: is spread for inference, over ranks that all have the same tokens; call it under"
                " torch.no_grad(), or spread it for training with parallelize"
            )
        return [_AllReduceDispatch(self.route, tokens)]


class _AllReduceDispatch(DispatchHandle):
    travels = False

    def __init__(self, route: Route, tokens: Dispatched) -> None:
        self._route, self._tokens = route, tokens

    def advance(self) -> None:
        """Nothing is under way."""

    def finish(self) -> Dispatched:
        return self._route.own(self._tokens)

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        where = f"{self._route.layer}, combine"
        return _Summed(in_flight_all_gather(y_RD, self._route.group, where=where), _added)


class Fixed(Exchange):
    """Every rank sends equally many tokens to each: the host never waits. For decoding a few tokens at a time.

    Args:
        route: of the tokens.
        bound: no rank has more tokens in a call.
    """

    def __init__(self, route: Route, bound: int) -> None:
        super().__init__(route)
        self.bound = bound

    def start_parts(
        self, tokens: Dispatched, num_parts: int, num_pieces: int = 1
    ) -> Sequence[DispatchHandle]:
        """Send all tokens to every rank, which leaves those of others alone; each part padded to its part of the bound.

        Raises:
            ConfigError: there are more tokens than the bound.
        """
        T, bound = len(tokens.x_TD), self.bound
        if bound < T:
            raise ConfigError(
                f"{T} tokens on this rank with fixed_tokens={bound}; raise fixed_tokens, or leave it out"
            )
        ends = [bound * i // num_parts for i in range(num_parts + 1)]
        bounds = [end - start for start, end in pairwise(ends)]
        parts = split(tokens, [min(end, T) - min(start, T) for start, end in pairwise(ends)])
        return [
            _FixedDispatch(self.route, part, size) for part, size in zip(parts, bounds, strict=True)
        ]


class _FixedDispatch(DispatchHandle):
    def __init__(self, route: Route, tokens: Dispatched, bound: int) -> None:
        self._route, self._num_tokens = route, len(tokens.x_TD)
        missing = (0, 0, 0, bound - self._num_tokens)
        where = f"{route.layer}, dispatch"
        # The value is an id beyond all experts, and a weight that nobody uses.
        both_BK = nn.functional.pad(
            weights_and_ids(tokens.weights_TK, tokens.expert_ids_TK),
            missing,
            value=float(route.num_experts),
        )
        x_BD = nn.functional.pad(tokens.x_TD, missing)
        self._both = in_flight_all_gather(both_BK, route.group, where=where)
        self._x = in_flight_all_gather(x_BD, route.group, where=where)

    def advance(self) -> None:
        """All is under way."""

    def finish(self) -> Dispatched:
        both_RK, x_RD = (move.finish().flatten(0, 1) for move in (self._both, self._x))
        return self._route.arrived(both_RK, x_RD)

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        group = self._route.group
        rows = in_flight_all_to_all(y_RD, None, group, where=f"{self._route.layer}, combine")
        return _Summed(rows, self._add)

    def _add(self, home_RD: Tensor) -> Tensor:
        return _added(home_RD.unflatten(0, (self._route.group.size, -1))[:, : self._num_tokens])


def _added(parts_PTD: Tensor) -> Tensor:
    """(T, D): the ranks' sums for the same tokens, added in FP32 (FP64 for FP64) in the order of the ranks."""
    return parts_PTD.to(accumulate_dtype(parts_PTD.dtype)).sum(0).to(parts_PTD.dtype)


class Ragged(Exchange):
    """Every rank sends each as many rows as it has for it; the host waits for their numbers, once."""

    def start_parts(
        self, tokens: Dispatched, num_parts: int, num_pieces: int = 1
    ) -> Sequence[DispatchHandle]:
        """Tell the other ranks how many rows to expect, in one exchange for all parts; `DispatchHandle.advance` sends them."""
        parts = split(tokens, part_sizes(tokens, num_parts))
        found = [_RaggedDispatch(self.route, part) for part in parts]
        counts_PC = torch.cat([part.counts_PC for part in found], 1)
        where = f"{self.route.layer}, dispatch"
        numbers = CountsInFlight(counts_PC, self.route.group, where=where)
        for i, part in enumerate(found):
            part.numbers, part.column = numbers, 2 * i
        return found


class _RaggedDispatch(DispatchHandle):
    def __init__(self, route: Route, tokens: Dispatched) -> None:
        self._route, self._tokens = route, tokens
        ids_TK = tokens.expert_ids_TK
        block_TK = route.blocks(ids_TK)
        self._places_BQ = on_device(route.places, ids_TK.device)
        destination_TJ = destinations(block_TK, self._places_BQ, route.group.size)
        self._slots = destination_TJ.shape[1]
        self._metadata = route_metadata(destination_TJ, route.group.size)
        self.counts_PC = self._new_counts_PC(block_TK)
        self.numbers: CountsInFlight
        self.column = 0
        self._rows: tuple[AsyncTensor, AsyncTensor] | None = None

    def _new_counts_PC(self, block_TK: Tensor) -> Tensor:  # noqa: N802
        """Rows to each rank, and live slots, so that the receiver can size its buffers."""
        rows_P = self._metadata.offsets_E.diff().to(torch.int64)
        slots_P = slots_of_ranks(block_TK, self._places_BQ)
        return torch.stack((rows_P, slots_P), 1)

    def _counts(self) -> list[Counts]:
        """Of rows and of slots."""
        return self.numbers.finish()[self.column : self.column + 2]

    def advance(self) -> None:
        if self._rows is not None:
            return
        route, (counts, _) = self._route, self._counts()
        self._metadata = metadata = only_rows(self._metadata, sum(counts.send))
        both_RK = choices_of_rows(self._tokens, metadata)
        x_RD = permute(self._tokens.x_TD, metadata)
        self._rows = route.send(both_RK, x_RD, counts, route.group, "dispatch")

    def finish(self) -> Dispatched:
        self.advance()
        assert self._rows is not None
        both_RK, x_RD = (move.finish() for move in self._rows)
        return self._route.arrived(both_RK, x_RD, sum(self._counts()[1].receive))

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        counts, _ = self._counts()
        where = f"{self._route.layer}, combine"
        rows = in_flight_all_to_all(y_RD, counts.mirrored(), self._route.group, where=where)
        return _Summed(rows, lambda home_RD: combine(home_RD, self._metadata, self._slots))


def slots_of_ranks(block_TK: Tensor, places_BQ: Tensor) -> Tensor:
    """(P,) choices that each rank of a route computes, of `Route.blocks` and the ranks' places."""
    num_blocks, num_slices = places_BQ.shape
    slots_B = count_all_choices(block_TK, num_blocks)
    slots_P = torch.empty(num_blocks * num_slices, dtype=torch.int64, device=block_TK.device)
    slots_P[places_BQ.flatten()] = slots_B.to(torch.int64).repeat_interleave(num_slices)
    return slots_P


def at_least_fp32(weights_TK: Tensor) -> Tensor:
    """Routing weights as they travel: FP32, or FP64 if they are."""
    return weights_TK if weights_TK.dtype == torch.float64 else weights_TK.float()


def choices_of_rows(tokens: Dispatched, metadata: RouteMetadata) -> Tensor:
    """(R, 2K) weights and global ids of each row, which are exact in FP32 up to 2^24."""
    weights_RK = permute(at_least_fp32(tokens.weights_TK), metadata)
    return weights_and_ids(weights_RK, tokens.expert_ids_TK[metadata.token_of_row_N])


def weights_and_ids(weights_RK: Tensor, ids_RK: Tensor) -> Tensor:
    """(R, 2K): both in one tensor, because they travel together."""
    weights_RK = at_least_fp32(weights_RK)
    return torch.cat((weights_RK, ids_RK.to(weights_RK.dtype)), 1)


def only_rows(metadata: RouteMetadata, num_rows: int) -> RouteMetadata:
    """The metadata without what is behind the last live row."""
    return replace(
        metadata,
        token_of_row_N=metadata.token_of_row_N[:num_rows],
        slot_of_row_N=metadata.slot_of_row_N[:num_rows],
    )


def destinations(block_TK: Tensor, places_BQ: Tensor, none: int) -> Tensor:
    """(T, J) ranks that each token goes to, each once, and `none` in empty places.

    Args:
        block_TK: block of experts of each choice; route_e for no choice.
        places_BQ: (route_e, route_f) rank of each block and slice.
        none: number of ranks.
    """
    T, K = block_TK.shape
    num_blocks, num_slices = places_BQ.shape
    if num_blocks <= K:
        chosen = torch.zeros(T, num_blocks + 1, dtype=torch.bool, device=block_TK.device)
        chosen = chosen.scatter(1, block_TK, True)[:, :-1]
        block_TJ = torch.arange(num_blocks, device=block_TK.device).expand(T, -1)
        block_TJ = torch.where(chosen, block_TJ, num_blocks)
    else:
        same_TKK = block_TK[:, :, None] == block_TK[:, None, :]
        again_TK = same_TKK.tril(-1).any(-1)
        block_TJ = block_TK.masked_fill(again_TK, num_blocks)
    table = torch.cat((places_BQ, places_BQ.new_full((1, num_slices), none)))
    return table[block_TJ].flatten(1)
