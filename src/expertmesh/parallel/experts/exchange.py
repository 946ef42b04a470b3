"""Exchanges that dispatch tokens to the ranks of their experts and combine the results: `Alone`, `AllReduceExchange`,
`Fixed` and `Ragged`.

An exchange has two asynchronous moves, dispatch (`start`, `DispatchHandle.finish`) and combine
(`DispatchHandle.start_home`, `CombineHandle.finish`). Work between a start and its finish overlaps with communication,
also in the backward. A start never waits for another rank.

A token is sent once to each rank that holds one of its experts (once to each slice, where experts are sliced), with its
expert ids and routing weights; the rank returns one partial sum for it. Capacity and drops are decided before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from expertmesh.comm.all_to_all.flat import AsyncCounts, Counts, async_all_to_all
from expertmesh.comm.async_collective import AsyncTensor
from expertmesh.comm.collectives import async_all_gather
from expertmesh.comm.group import RankGroup
from expertmesh.config.dispatch_options import DispatchDtype
from expertmesh.errors import ConfigError
from expertmesh.moe.capacity import count_all_choices
from expertmesh.moe.dispatch import Dispatched
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata
from expertmesh.parallel.experts.route_split import RouteSplit
from expertmesh.parallel.experts.tables import on_device


@dataclass(frozen=True)
class Route:
    """Ranks that tokens travel over under one split."""

    split: RouteSplit
    group: RankGroup  # ranks that share their tokens
    num_experts: int  # E
    first_expert: int  # global id of the first expert that this rank computes
    places: list[list[int]]  # rank in the group of [block of experts][slice]
    layer: str  # name for errors and the byte counter
    payload: DispatchDtype = "same"  # dtype of dispatched tokens

    @property
    def num_local(self) -> int:
        """Number of experts that this rank computes."""
        return self.num_experts // self.split.route_e

    def blocks(self, ids_TK: Tensor) -> Tensor:
        """Block of experts of each choice; `split.route_e` for no choice."""
        return torch.where(ids_TK < self.num_experts, ids_TK // self.num_local, self.split.route_e)

    def local_ids(self, ids_RK: Tensor, first: int | Tensor) -> tuple[Tensor, Tensor]:
        """Ids counted from a rank's first expert (`num_local` for other ranks' experts), and a mask of the rank's own
        choices."""
        local_RK = ids_RK - first
        own_RK = (local_RK >= 0) & (local_RK < self.num_local)
        return torch.where(own_RK, local_RK, self.num_local), own_RK

    def own(self, tokens: Dispatched) -> Dispatched:
        """Tokens with ids counted from this rank's first expert; choices of other ranks' experts become no choice."""
        local_RK, own_RK = self.local_ids(tokens.expert_ids_TK, self.first_expert)
        return replace(tokens, expert_ids_TK=local_RK, weights_TK=tokens.weights_TK * own_RK)

    def send(
        self, both_RK: Tensor, x_RD: Tensor, counts: Counts, group: RankGroup, purpose: str
    ) -> tuple[AsyncTensor, AsyncTensor]:
        """Start to send rows, and their weights and ids from `choices_of_rows`, which are never sent in 8 bits."""
        where = f"{self.layer}, {purpose}"
        both = async_all_to_all(both_RK, counts, group, where=where)
        x = async_all_to_all(x_RD, counts, group, where=where, payload=self.payload)
        return both, x

    def arrived(self, both_RK: Tensor, x_RD: Tensor, max_rows: int | None = None) -> Dispatched:
        """Received rows with their weights and ids, as tokens of this rank's experts."""
        weights_RK, ids_RK = both_RK.tensor_split(2, 1)
        return self.own(Dispatched(x_RD, ids_RK.detach().to(torch.int64), weights_RK, max_rows))


class CombineHandle(Protocol):
    """Combine under way: partial sums that are sent back."""

    def advance(self) -> None:
        """Start the next stage of communication; `finish` calls this if nobody did."""

    def finish(self) -> Tensor:
        """Wait for the partial sums and add them per token, in FP32 (FP64 for FP64) and a fixed order; (T, D)."""


class DispatchHandle(ABC):
    """Dispatch under way: tokens that are sent to their experts."""

    travels = True
    """Whether communication takes place that computation could hide."""

    @abstractmethod
    def advance(self) -> None:
        """Wait for the row counts of other ranks, and send the rows; `finish` calls this if nobody did."""

    @abstractmethod
    def finish(self) -> Dispatched:
        """Wait for the tokens of all ranks; returns them with local expert ids.

        Raises:
            CollectiveError: a rank is gone or late.
        """

    @abstractmethod
    def start_home(self, y_RD: Tensor) -> CombineHandle:
        """Start to send the partial sum of each received token back to its rank."""


Outbound = DispatchHandle
"""Former name of `DispatchHandle`, kept for user-defined exchanges."""


class Exchange:
    """Dispatches and combines tokens over the ranks of one route. All of its ranks must call, in the same order.
    Subclasses define `start` or `start_parts`.

    Args:
        route: ranks of the tokens.
    """

    def __init__(self, route: Route) -> None:
        self.route = route

    def start(self, tokens: Dispatched) -> DispatchHandle:
        """Start the dispatch of tokens, without waiting for other ranks.

        Args:
            tokens: tokens of this rank, with global expert ids.
        """
        return self.start_parts(tokens, 1)[0]

    def start_parts(self, tokens: Dispatched, num_parts: int, num_chunks: int = 1) -> Sequence[DispatchHandle]:
        """Start the dispatch of tokens in parts that travel one after the other.

        Args:
            tokens: tokens of this rank, with global expert ids; some parts may be empty.
            num_parts: number of parts, the same on all ranks.
            num_chunks: number of chunks of a part, where dispatch has several stages that can overlap; the same on all
                ranks.

        Returns:
            One handle per part, in the order of the tokens; fewer where no tokens travel.
        """
        return [self.start(part) for part in split(tokens, part_sizes(tokens, num_parts))]


def part_sizes(tokens: Dispatched, num_parts: int) -> list[int]:
    """Sizes of parts of the tokens, equal up to one token."""
    T = len(tokens.x_TD)
    return [T * (i + 1) // num_parts - T * i // num_parts for i in range(num_parts)]


def split(tokens: Dispatched, sizes: Sequence[int]) -> list[Dispatched]:
    """Consecutive parts of tokens with given sizes, differentiable."""
    if len(sizes) == 1:
        return [tokens]
    columns = (tokens.x_TD, tokens.expert_ids_TK, tokens.weights_TK)
    parts = zip(*(column.split(list(sizes)) for column in columns), strict=True)
    return [Dispatched(x_TD, ids, weights, tokens.max_rows) for x_TD, ids, weights in parts]


@dataclass(frozen=True)
class _Summed:
    """Combine of rows with a function that adds them."""

    rows: AsyncTensor
    add: Callable[[Tensor], Tensor]

    def advance(self) -> None:
        """Do nothing: all communication has started."""

    def finish(self) -> Tensor:
        return self.add(self.rows.finish())


@dataclass(frozen=True)
class _LocalCombine:
    y_TD: Tensor

    def advance(self) -> None:
        """Do nothing: no communication."""

    def finish(self) -> Tensor:
        return self.y_TD


class _LocalDispatch(DispatchHandle):
    travels = False

    def __init__(self, tokens: Dispatched) -> None:
        self._tokens = tokens

    def advance(self) -> None:
        """Do nothing: no communication."""

    def finish(self) -> Dispatched:
        return self._tokens

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        return _LocalCombine(y_RD)


class Alone(Exchange):
    """Exchange for a rank that has all experts of its tokens: no communication."""

    def start_parts(self, tokens: Dispatched, num_parts: int, num_chunks: int = 1) -> Sequence[DispatchHandle]:
        """Keep all tokens in one part."""
        return [_LocalDispatch(tokens)]


class AllReduceExchange(Exchange):
    """Exchange of ranks that all have the same tokens: each computes its experts, or slices of them, and the results
    are summed over ranks.

    For inference: one collective per layer, no host synchronization, and the same bits on all ranks.
    """

    def start_parts(self, tokens: Dispatched, num_parts: int, num_chunks: int = 1) -> Sequence[DispatchHandle]:
        """Keep all tokens in one part."""
        if torch.is_grad_enabled() and (tokens.x_TD.requires_grad or tokens.weights_TK.requires_grad):
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
        """Do nothing: no communication."""

    def finish(self) -> Dispatched:
        return self._route.own(self._tokens)

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        where = f"{self._route.layer}, combine"
        return _Summed(async_all_gather(y_RD, self._route.group, where=where), added_over_ranks)


class Fixed(Exchange):
    """Exchange of fixed size: every rank sends equally many tokens to each, so the host never waits. For decoding a few
    tokens at a time.

    Args:
        bound: maximum number of tokens of a rank per call.
    """

    def __init__(self, route: Route, bound: int) -> None:
        super().__init__(route)
        if route.payload != "same":
            raise ConfigError(f"dispatch_dtype={route.payload} with Fixed: it sends tokens as they are; leave one out")
        self.bound = bound

    def start_parts(self, tokens: Dispatched, num_parts: int, num_chunks: int = 1) -> Sequence[DispatchHandle]:
        """All-gather the tokens, each part padded to its share of the bound; ranks skip choices of other ranks'
        experts."""
        T, bound = len(tokens.x_TD), self.bound
        if bound < T:
            raise ConfigError(f"{T} tokens on this rank with bound={bound}; raise the bound of Fixed, or use Ragged")
        ends = [bound * i // num_parts for i in range(num_parts + 1)]
        bounds = [end - start for start, end in pairwise(ends)]
        parts = split(tokens, [min(end, T) - min(start, T) for start, end in pairwise(ends)])
        return [_FixedDispatch(self.route, part, size) for part, size in zip(parts, bounds, strict=True)]


class _FixedDispatch(DispatchHandle):
    def __init__(self, route: Route, tokens: Dispatched, bound: int) -> None:
        self._route, self._num_tokens = route, len(tokens.x_TD)
        missing = (0, 0, 0, bound - self._num_tokens)
        where = f"{route.layer}, dispatch"
        # The padding value is an id beyond all experts, and an unused weight.
        both_BK = nn.functional.pad(
            weights_and_ids(tokens.weights_TK, tokens.expert_ids_TK),
            missing,
            value=float(route.num_experts),
        )
        x_BD = nn.functional.pad(tokens.x_TD, missing)
        self._both = async_all_gather(both_BK, route.group, where=where)
        self._x = async_all_gather(x_BD, route.group, where=where)

    def advance(self) -> None:
        """Do nothing: all communication has started."""

    def finish(self) -> Dispatched:
        both_RK, x_RD = (move.finish().flatten(0, 1) for move in (self._both, self._x))
        return self._route.arrived(both_RK, x_RD)

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        group = self._route.group
        rows = async_all_to_all(y_RD, None, group, where=f"{self._route.layer}, combine")
        return _Summed(rows, self._add)

    def _add(self, home_RD: Tensor) -> Tensor:
        return added_over_ranks(home_RD.unflatten(0, (self._route.group.size, -1))[:, : self._num_tokens])


def added_over_ranks(parts_PTD: Tensor) -> Tensor:
    """(T, D): the ranks' sums for the same tokens, added in FP32 (FP64 for FP64) in rank order."""
    return parts_PTD.to(accumulate_dtype(parts_PTD.dtype)).sum(0).to(parts_PTD.dtype)


class Ragged(Exchange):
    """Exchange of ragged size: each rank sends the rows that another needs; the host waits once, for the row counts."""

    def start_parts(self, tokens: Dispatched, num_parts: int, num_chunks: int = 1) -> Sequence[DispatchHandle]:
        """Exchange row counts once for all parts; `DispatchHandle.advance` sends the rows."""
        parts = split(tokens, part_sizes(tokens, num_parts))
        found = [_RaggedDispatch(self.route, part) for part in parts]
        counts_PC = torch.cat([part.counts_PC for part in found], 1)
        where = f"{self.route.layer}, dispatch"
        numbers = AsyncCounts(counts_PC, self.route.group, where=where)
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
        self.numbers: AsyncCounts
        self.column = 0
        self._rows: tuple[AsyncTensor, AsyncTensor] | None = None

    def _new_counts_PC(self, block_TK: Tensor) -> Tensor:  # noqa: N802
        """(P, 2): rows sent to each rank, and their live slots, from which the receiver sizes its buffers."""
        rows_P = self._metadata.offsets_E.diff().to(torch.int64)
        slots_P = slots_of_ranks(block_TK, self._places_BQ)
        return torch.stack((rows_P, slots_P), 1)

    def _counts(self) -> list[Counts]:
        """Counts of rows, and of live slots."""
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
        rows = async_all_to_all(y_RD, counts.mirrored(), self._route.group, where=where)
        return _Summed(rows, lambda home_RD: combine(home_RD, self._metadata, self._slots))


def slots_of_ranks(block_TK: Tensor, places_BQ: Tensor) -> Tensor:
    """(P,) choices that each rank of a route computes, from `Route.blocks` and the ranks' places."""
    num_blocks, num_slices = places_BQ.shape
    slots_B = count_all_choices(block_TK, num_blocks)
    slots_P = torch.empty(num_blocks * num_slices, dtype=torch.int64, device=block_TK.device)
    slots_P[places_BQ.flatten()] = slots_B.to(torch.int64).repeat_interleave(num_slices)
    return slots_P


def at_least_fp32(weights_TK: Tensor) -> Tensor:
    """Routing weights in the dtype in which they are sent: FP32, or FP64 for FP64."""
    return weights_TK if weights_TK.dtype == torch.float64 else weights_TK.float()


def choices_of_rows(tokens: Dispatched, metadata: RouteMetadata) -> Tensor:
    """(R, 2K) routing weights and global expert ids of each row; ids are exact in FP32 up to 2^24."""
    weights_RK = permute(at_least_fp32(tokens.weights_TK), metadata)
    return weights_and_ids(weights_RK, tokens.expert_ids_TK[metadata.token_of_row_N])


def weights_and_ids(weights_RK: Tensor, ids_RK: Tensor) -> Tensor:
    """(R, 2K): weights and ids in one tensor, sent as one message."""
    weights_RK = at_least_fp32(weights_RK)
    return torch.cat((weights_RK, ids_RK.to(weights_RK.dtype)), 1)


def only_rows(metadata: RouteMetadata, num_rows: int) -> RouteMetadata:
    """Metadata of the first `num_rows` rows."""
    return replace(
        metadata,
        token_of_row_N=metadata.token_of_row_N[:num_rows],
        slot_of_row_N=metadata.slot_of_row_N[:num_rows],
    )


def destinations(block_TK: Tensor, places_BQ: Tensor, none: int) -> Tensor:
    """(T, J) ranks that each token goes to, each once; unused entries hold `none`.

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
