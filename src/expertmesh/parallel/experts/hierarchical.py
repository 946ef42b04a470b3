"""Hierarchical all-to-all: a token crosses to another node once, however many of its experts or ranks are there.

Dispatch: a token crosses to one rank of each node that it needs, and that rank forwards it inside the node. Combine:
    the ranks of a node send their partial sums to that rank, which adds them in FP32 (FP64 for FP64) in a fixed order
    and sends one sum across. Tokens go in chunks, so that one chunk is forwarded inside a node while the next crosses.

The entry rank of a node for a sender follows from the sender's index in its own node, so all ranks of a node serve
equally many senders if nodes are equally large. Nodes may have different numbers of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.comm.all_to_all.flat import AsyncCounts, Counts, async_all_to_all
from expertmesh.comm.async_collective import AsyncTensor
from expertmesh.comm.group import RankGroup
from expertmesh.moe.capacity import count_all_choices
from expertmesh.moe.dispatch import Dispatched
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata
from expertmesh.parallel.experts.exchange import (
    CombineHandle,
    DispatchHandle,
    Exchange,
    Route,
    choices_of_rows,
    destinations,
    only_rows,
    part_sizes,
    slots_of_ranks,
    split,
)
from expertmesh.parallel.experts.tables import on_device


@dataclass(frozen=True)
class Nodes:
    """Nodes of the ranks of a route."""

    members: list[list[int]]  # for each node, the indices of its ranks in the route's group, ascending
    inside: RankGroup  # group of the route's ranks on this rank's node, in the same order

    def of(self, place: int) -> int:
        """Node of a rank (index in the route's group)."""
        return next(m for m, places in enumerate(self.members) if place in places)

    def entry(self, sender: int, node: int) -> int:
        """Rank of a node that receives a sender's tokens for it; for the sender's own node, the sender itself."""
        own = self.members[self.of(sender)].index(sender)
        return self.members[node][own % len(self.members[node])]


class Hierarchical(Exchange):
    """All-to-all across nodes with one copy of a token per node, then inside nodes; sizes are ragged as in `Ragged`.

    Args:
        nodes: at least two nodes, one of which has several ranks.
    """

    def __init__(self, route: Route, nodes: Nodes) -> None:
        super().__init__(route)
        self.nodes = nodes

    def start_parts(self, tokens: Dispatched, num_parts: int, num_chunks: int = 1) -> Sequence[DispatchHandle]:
        """Exchange the row counts of dispatch and combine, once for all parts; each part crosses in chunks."""
        cut = split(tokens, part_sizes(tokens, num_parts * num_chunks))
        found = [_NodeDispatch(self.route, self.nodes, chunk) for chunk in cut]
        counts_PC = torch.cat([chunk.counts_PC for chunk in found], 1)
        numbers = AsyncCounts(counts_PC, self.route.group, where=f"{self.route.layer}, dispatch")
        width = counts_PC.shape[1] // len(found)
        for i, chunk in enumerate(found):
            chunk.numbers, chunk.columns = numbers, slice(width * i, width * (i + 1))
        if num_chunks == 1:
            return found
        return [_Chunks(found[i : i + num_chunks]) for i in range(0, len(found), num_chunks)]


class _Chunks(DispatchHandle):
    """Tokens that cross in chunks; the received chunks are concatenated."""

    def __init__(self, chunks: Sequence["_NodeDispatch"]) -> None:
        self._chunks, self._sizes = chunks, [0]

    def advance(self) -> None:
        for chunk in self._chunks:
            chunk.advance()

    def finish(self) -> Dispatched:
        self.advance()
        for chunk in self._chunks:
            chunk.hand_on()
        found = [chunk.finish() for chunk in self._chunks]
        self._sizes = [len(tokens.x_TD) for tokens in found]
        return Dispatched(
            torch.cat([tokens.x_TD for tokens in found]),
            torch.cat([tokens.expert_ids_TK for tokens in found]),
            torch.cat([tokens.weights_TK for tokens in found]),
            sum(tokens.max_rows or 0 for tokens in found),
        )

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        return _CombineInChunks(self._chunks, y_RD.split(self._sizes))


class _CombineInChunks:
    """Combine in chunks: the first starts at once, each other one just before the previous one crosses nodes."""

    def __init__(self, chunks: Sequence["_NodeDispatch"], y: Sequence[Tensor]) -> None:
        self._chunks, self._y = chunks, y
        self._under_way = [chunks[0].start_home(y[0])]

    def advance(self) -> None:
        for chunk, y_RD in list(zip(self._chunks, self._y, strict=True))[len(self._under_way) :]:
            self._under_way.append(chunk.start_home(y_RD))
            self._under_way[-2].advance()
        self._under_way[-1].advance()

    def finish(self) -> Tensor:
        self.advance()
        return torch.cat([chunk.finish() for chunk in self._under_way])


class _NodeCombine:
    def __init__(
        self,
        inside: AsyncTensor,
        across: Callable[[Tensor], AsyncTensor],
        add: Callable[[Tensor], Tensor],
    ) -> None:
        self._inside, self._start_across, self._add = inside, across, add
        self._across: AsyncTensor | None = None

    def advance(self) -> None:
        if self._across is None:
            self._across = self._start_across(self._inside.finish())

    def finish(self) -> Tensor:
        self.advance()
        assert self._across is not None
        return self._add(self._across.finish())


class _NodeDispatch(DispatchHandle):
    """Dispatch of one piece; "rows" cross nodes, "copies" travel inside this rank's node."""

    def __init__(self, route: Route, nodes: Nodes, tokens: Dispatched) -> None:
        self._route, self._nodes, self._tokens = route, nodes, tokens
        device = tokens.expert_ids_TK.device
        self._places_BQ = on_device(route.places, device)
        P, M, here = route.group.size, len(nodes.members), route.group.rank
        place_TJ = self._places(tokens.expert_ids_TK)
        node_of_P = on_device([*map(nodes.of, range(P)), M], device)
        entry_M1 = on_device([[nodes.entry(here, m)] for m in range(M)], device)
        entry_TJ = destinations(node_of_P[place_TJ], entry_M1, P)
        self._slots = entry_TJ.shape[1]
        self._metadata = route_metadata(entry_TJ, P)
        self.counts_PC = self._new_counts_PC(place_TJ)
        self.numbers: AsyncCounts
        self.columns = slice(0, 0)
        self._across: tuple[AsyncTensor, AsyncTensor] | None = None
        self._inside: tuple[RouteMetadata, int, Counts] | None = None
        self._arriving: tuple[AsyncTensor, AsyncTensor] | None = None

    def _places(self, ids_TK: Tensor) -> Tensor:
        """(T, J) ranks that each token goes to, each once; unused entries hold the number of ranks."""
        block_TK = self._route.blocks(ids_TK)
        return destinations(block_TK, self._places_BQ, self._route.group.size)

    def _new_counts_PC(self, place_TJ: Tensor) -> Tensor:  # noqa: N802
        """(P, C) per rank: rows sent across to it; copies and live slots meant for it; copies that it forwards to each
        rank of its node for this rank."""
        route, nodes, device = self._route, self._nodes, place_TJ.device
        P, here = route.group.size, route.group.rank
        copies_P = count_all_choices(place_TJ, P)
        block_TK = route.blocks(self._tokens.expert_ids_TK)
        slots_P = slots_of_ranks(block_TK, self._places_BQ)
        rows_P = self._metadata.offsets_E.diff().to(torch.int64)
        widest = max(map(len, nodes.members))
        places = [[P] * widest for _ in range(P)]  # P: nobody
        for m, members in enumerate(nodes.members):
            places[nodes.entry(here, m)][: len(members)] = members
        handed_PL = torch.cat((copies_P, copies_P.new_zeros(1)))[on_device(places, device)]
        return torch.cat((torch.stack((rows_P, copies_P, slots_P), 1), handed_PL), 1)

    def _counts(self) -> list[Counts]:
        return self.numbers.finish()[self.columns]

    def advance(self) -> None:
        if self._across is not None:
            return
        route, rows = self._route, self._counts()[0]
        self._metadata = metadata = only_rows(self._metadata, sum(rows.send))
        both_RK = choices_of_rows(self._tokens, metadata)
        x_RD = permute(self._tokens.x_TD, metadata)
        self._across = route.send(both_RK, x_RD, rows, route.group, "dispatch across nodes")

    def hand_on(self) -> None:
        """Wait for the rows from other nodes, and forward them inside the node; `finish` calls this if nobody did."""
        if self._arriving is not None:
            return
        self.advance()
        assert self._across is not None
        both_RK, x_RD = (rows.finish() for rows in self._across)
        metadata, _, copies = self._inside = self._inside_places(both_RK)
        both_RK, x_RD = permute(both_RK, metadata), permute(x_RD, metadata)
        inside, purpose = self._nodes.inside, "dispatch inside a node"
        self._arriving = self._route.send(both_RK, x_RD, copies, inside, purpose)

    def finish(self) -> Dispatched:
        self.hand_on()
        assert self._arriving is not None
        both_RK, x_RD = (rows.finish() for rows in self._arriving)
        return self._route.arrived(both_RK, x_RD, sum(self._counts()[2].receive))

    def _inside_places(self, both_RK: Tensor) -> tuple[RouteMetadata, int, Counts]:
        """Metadata to forward received rows inside the node, and the counts; uses numbers that the host has already."""
        nodes, group, inside = self._nodes, self._route.group, self._nodes.inside
        _, copies, _, *handed = self._counts()
        K = self._tokens.expert_ids_TK.shape[1]
        place_RJ = self._places(both_RK[:, K:].detach().to(torch.int64))
        here = nodes.of(group.rank)
        members = nodes.members[here]
        places = [members.index(p) if p in members else inside.size for p in range(group.size)]
        place_inside_P = on_device([*places, inside.size], place_RJ.device)
        send = [sum(column.receive) for column in handed[: inside.size]]
        receive = [sum(n for o, n in enumerate(copies.receive) if nodes.entry(o, here) == entry) for entry in members]
        metadata = route_metadata(place_inside_P[place_RJ], inside.size)
        return only_rows(metadata, sum(send)), place_RJ.shape[1], Counts(send, receive)

    def start_home(self, y_RD: Tensor) -> CombineHandle:
        assert self._inside is not None, "tokens go home after they have arrived"
        metadata, slots, copies = self._inside
        layer, group, inside = self._route.layer, self._route.group, self._nodes.inside
        rows = self._counts()[0]

        def across(home_RD: Tensor) -> AsyncTensor:
            y_RD = combine(home_RD, metadata, slots)
            where = f"{layer}, combine across nodes"
            return async_all_to_all(y_RD, rows.mirrored(), group, where=where)

        where = f"{layer}, combine inside a node"
        move = async_all_to_all(y_RD, copies.mirrored(), inside, where=where)
        return _NodeCombine(move, across, lambda y_RD: combine(y_RD, self._metadata, self._slots))
