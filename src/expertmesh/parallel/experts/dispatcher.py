"""Expert parallelism behind the layer's dispatcher protocol: an exchange moves tokens, a storage gathers weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from expertmesh.comm.all_to_all.payload import row_bytes
from expertmesh.comm.collectives import all_reduce
from expertmesh.comm.world import World
from expertmesh.config.dispatch_options import AS_USUAL, AllToAll, DispatchDtype, DispatchOptions
from expertmesh.config.renamed import reads_former_names
from expertmesh.config.run import ExpertOrder
from expertmesh.costs.communication import (
    USUAL_NETWORK,
    Network,
    TokenLoad,
    faster_all_to_all,
)
from expertmesh.costs.placement import hottest
from expertmesh.moe.dispatch import Dispatched, Experts, apply_experts
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.phases import phase
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.parallel.experts.adaptive import LayerChooser
from expertmesh.parallel.experts.exchange import (
    AllReduceExchange,
    Alone,
    CombineHandle,
    DispatchHandle,
    Exchange,
    Fixed,
    Ragged,
    Route,
)
from expertmesh.parallel.experts.fits import check_dispatch, check_spread, check_way
from expertmesh.parallel.experts.gather import GatheredWeights
from expertmesh.parallel.experts.hierarchical import Hierarchical, Nodes
from expertmesh.parallel.experts.load_record import (
    FIRST_TOKENS,
    Chosen,
    LoadRecord,
    Repetitions,
    route_shape,
)
from expertmesh.parallel.experts.modules import ExpertModules
from expertmesh.parallel.experts.prefetch import Prefetcher, in_backward
from expertmesh.parallel.experts.replicated_experts import LocalTokens, without_hot
from expertmesh.parallel.experts.route_split import RouteSplit, make_split
from expertmesh.parallel.experts.storage import ExpertShards, ExpertStorage, Keep
from expertmesh.parallel.experts.tables import on_device
from expertmesh.parallel.offload import compute_device

_never_compiled = torch._disable_dynamo
"""Collectives are no graph, and what a call decides changes; the public name would import the compiler."""

PIECE_BYTES = 1 << 20
MAX_PIECES = 8
"""Across nodes tokens go in pieces of so many bytes, but not in more pieces than these."""


class SpreadJourney:
    """Tokens and weights on their way to each other. A `RoundTrip`.

    Args:
        outbounds: the tokens, in one part or several: while the experts compute on one, the next travels out and the one
            before travels home.
        storage: of the weights.
        gathered: weights that are being gathered; None: the experts have their own.
        staying: the choices of hot experts, computed while tokens travel; None: there are none.
        when_over: each is told of the result, at the end of the forward.
    """

    def __init__(
        self,
        outbounds: Sequence[DispatchHandle],
        storage: ExpertShards,
        gathered: GatheredWeights | None,
        staying: LocalTokens | None = None,
        when_over: Sequence[Callable[[Tensor], None]] = (),
    ) -> None:
        self._outbounds, self._storage, self._gathered = outbounds, storage, gathered
        self._staying, self._when_over = staying, when_over

    @_never_compiled
    def advance(self) -> None:
        """Send the rows, as soon as the other ranks have said how many to expect.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        with phase("dispatch"):
            self._outbounds[0].advance()

    @_never_compiled
    def finish(self, experts: Experts) -> Tensor:
        """Run the experts on the tokens of all ranks, and add up the partial sums that come home.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        self.advance()
        outbounds, gathered = self._outbounds, self._gathered
        hot_TD = None if self._staying is None else self._staying.finish(experts)
        parameters = None
        if gathered is not None:
            parameters = self._storage.finish_gather(gathered, num_calls=len(outbounds))
        under_way: list[CombineHandle] = []
        found: list[Tensor] = []
        for outbound, following in zip_longest(outbounds, outbounds[1:]):
            with phase("dispatch"):
                if following is not None:
                    following.advance()
                tokens = outbound.finish()
            given = parameters
            if outbound is outbounds[0] and gathered is not None and parameters is not None:
                # in the backward it is last, when no other part's products are left to fill the time of its exchange
                given = gathered.late(parameters) if outbound.travels else parameters
            y_RD = apply_experts(experts, tokens, given)
            with phase("combine"):
                if gathered is not None and following is None:  # the backward begins here
                    gathered.announce_backward(y_RD)
                under_way.append(outbound.start_home(y_RD))
                under_way[-1].advance()
                # one later, so that the backward, in the opposite order, sends gradients one ahead as well
                found += [homebound.finish() for homebound in under_way[:-1]]
                del under_way[:-1]
        with phase("combine"):
            found.append(under_way[0].finish())
            y_TD = found[0] if len(found) == 1 else torch.cat(found)
            y_TD = y_TD if hot_TD is None else y_TD + hot_TD
        for told in self._when_over:
            told(y_TD)
        return y_TD


class ExpertDispatcher:
    """Routes tokens over the ranks that hold a layer's experts. A `TokenDispatcher`.

    Args:
        storage: of the experts' parameters.
        num_experts: E.
        way: how tokens travel unless a call says otherwise; what it leaves open: over all ranks of one copy, at once, flat.
            Where all ranks that share tokens are on one node, or each on its own, hierarchical is flat.
        fixed_tokens: None: ragged exchanges, whose sizes the host waits for. A number: no rank has more tokens in a
            call; every rank sends that many to each, so that the host never waits: for decoding a few tokens at a time.
        nodes: the node of each rank of the world; None: as torchrun started them.
        network: that the cost model of all_to_all="auto" assumes.
        exchanges: makes the exchange of a route; None: the one of this package that fits.
        dispatch_dtype: how tokens travel to their experts: in their own type ("same"), or in 8 bits with a scale for every
            128 elements ("int8", "float8_e4m3"). What comes home, and gradients, travel in their own type.

    Raises:
        ConfigError: route_degree does not divide the ranks, an option has no such value, or does not go with another.
    """

    def __init__(
        self,
        storage: ExpertShards,
        *,
        num_experts: int,
        way: DispatchOptions = AS_USUAL,
        fixed_tokens: int | None = None,
        nodes: Sequence[int] | None = None,
        network: Network = USUAL_NETWORK,
        exchanges: Callable[[Route], Exchange] | None = None,
        dispatch_dtype: DispatchDtype = "same",
    ) -> None:
        self.storage, self.num_experts, self.network = storage, num_experts, network
        self.dispatch_dtype: DispatchDtype = dispatch_dtype
        self._fixed_tokens, self.exchanges = fixed_tokens, exchanges
        self._nodes = None if nodes is None else tuple(nodes)
        self._everyone = storage.world.all_ranks()
        self._exchanges: dict[tuple[int, bool], Exchange] = {}
        self.load = LoadRecord(num_experts, num_ranks=storage.world.size)
        self.chooser: LayerChooser | None = None
        self._repetitions = Repetitions(storage.layer)
        check_dispatch(
            dispatch_dtype, nodes=nodes, fixed_tokens=fixed_tokens, num_ranks=storage.world.size
        )
        self._check(way)
        usual = DispatchOptions(
            make_split(storage.degrees, way.route_degree).route_degree,
            way.overlap_degree or 1,
            way.all_to_all or "flat",
            way.replicated_experts or 0,
        )
        self.usual = usual

    def exchange(self, route_degree: int | None = None, *, is_flat: bool | None = None) -> Exchange:
        """What moves tokens under a split; every rank must ask when a split is used first.

        Args:
            route_degree: of the split; None: the usual one.
            is_flat: straight, or between nodes first; None: as is usual.

        Raises:
            ConfigError: route_degree does not divide the ranks.
        """
        degree = self.usual.route_degree if route_degree is None else route_degree
        assert degree is not None
        key = degree, self.usual.all_to_all != "hierarchical" if is_flat is None else is_flat
        if key not in self._exchanges:
            route = self._new_route(make_split(self.storage.degrees, degree))
            make = self.exchanges or partial(self._usual_exchange, is_flat=key[1])
            self._exchanges[key] = make(route)
        return self._exchanges[key]

    @property
    def tokens_are_replicated(self) -> bool:
        """Whether every rank has all tokens, for inference."""
        return self.exchanges is AllReduceExchange

    def _usual_exchange(self, route: Route, *, is_flat: bool) -> Exchange:
        if route.group.size == 1:
            return Alone(route)
        if self._fixed_tokens is not None:
            return Fixed(route, self._fixed_tokens)
        if not is_flat:
            nodes = self._nodes_of(route)
            if 1 < len(nodes.members) < route.group.size:
                return Hierarchical(route, nodes)
        return Ragged(route)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of each rank of the world; every rank must ask."""
        return self.storage.world.nodes() if self._nodes is None else self._nodes

    def _nodes_of(self, route: Route) -> Nodes:
        """Where the ranks of a route lie; every rank must ask, because groups are made."""
        W, node_of = self.storage.degrees.num_ranks, self.nodes
        cells: dict[tuple[int, int, int], list[int]] = {}
        for copy in range(self.storage.num_replicas):
            for i, cell in enumerate(route.split.route_cells()):
                for position in (copy * W + rank for rank in cell):
                    cells.setdefault((copy, i, node_of[position]), []).append(position)
        inside = self.storage.world.group(list(cells.values()), name="the ranks of a node")
        position = self.storage.world.position
        copy, i, _ = next(key for key, cell in cells.items() if position in cell)
        mine = [positions for key, positions in cells.items() if key[:2] == (copy, i)]
        all_places = {p: place for place, p in enumerate(sorted(p for c in mine for p in c))}
        return Nodes([[all_places[p] for p in positions] for positions in mine], inside)

    def _new_route(self, split: RouteSplit) -> Route:
        cells = split.route_cells()
        members = next(cell for cell in cells if self.storage.rank in cell)
        places = [[0] * split.route_f for _ in range(split.route_e)]
        for place, rank in enumerate(members):
            block, part = split.block(rank)
            places[block][part] = place
        first = split.block(self.storage.rank)[0] * (self.num_experts // split.route_e)
        group = self.storage.group(cells, "the ranks that share tokens")
        layer, payload = self.storage.layer, self.dispatch_dtype
        return Route(split, group, self.num_experts, first, places, layer, payload)

    @_never_compiled
    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Sum over all ranks, copies of the experts included; the first of a call are the choices of each expert.

        Where all ranks have the same tokens, theirs are those of all.
        """
        if self.tokens_are_replicated:
            return value
        where = f"{self.storage.layer}, statistics"
        if not self.load.is_awaited(value):
            return all_reduce(value, self._everyone, where=where)
        extra = [] if self.chooser is None else self.chooser.to_agree_on()
        given = torch.cat((value, on_device(extra, value.device).to(value))) if extra else value
        total = all_reduce(given, self._everyone, where=where)
        if extra and self.chooser is not None:
            self.chooser.agreed(total[self.num_experts :])
            total = total[: self.num_experts]
        self.load.note(total)
        return total

    def _check(self, way: DispatchOptions) -> None:
        """Refuse what no call can have.

        Raises:
            ConfigError: see `start`.
        """
        check_way(
            way,
            num_experts=self.num_experts,
            stay=self.storage.stay,
            fixed_tokens=self._fixed_tokens,
        )

    @_never_compiled
    def start(self, tokens: Dispatched, way: DispatchOptions = AS_USUAL) -> SpreadJourney:
        """Send tokens to their experts, and begin to gather weights; see `TokenDispatcher`.

        Raises:
            ConfigError: route_degree does not divide the ranks, overlap_degree is below 1, there are fewer experts than
                replicated_experts, or more tokens than `fixed_tokens`.
            CollectiveError: a rank is gone or late.
        """
        chosen = self._choose(way, tokens)
        exchange = self.exchange(chosen.route_degree, is_flat=chosen.is_flat)
        when_over = []
        if not in_backward():
            when_over.append(self._repetitions.note(chosen))
            if self.chooser is not None:
                tokens, stop = self.chooser.timed(tokens)
                when_over += [] if stop is None else [stop]
        x_TD = tokens.x_TD
        cast = None if x_TD.dtype == torch.float64 else autocast_dtype(x_TD.device)
        hot = chosen.hot if exchange.route.group.size > 1 else ()
        replicated = self.storage.replicate(hot, cast) if hot else None
        gathered = self.storage.start_gather(exchange.route.split, cast)
        if cast is not None and self.storage.casts_tokens:
            # the experts would do so; on the way it is half the bytes
            tokens = replace(tokens, x_TD=x_TD.to(cast))
        staying = None
        if replicated is not None:
            staying = LocalTokens(tokens, replicated, self.num_experts)
            tokens = without_hot(tokens, hot, self.num_experts)
        outbounds = exchange.start_parts(tokens, chosen.num_parts, chosen.num_pieces)
        return SpreadJourney(outbounds, self.storage, gathered, staying, when_over)

    def _choose(self, way: DispatchOptions, tokens: Dispatched) -> "Chosen":
        """What a call does; in the repetition of a forward (activation checkpointing) what that did."""
        self.load.begin(is_again=in_backward())
        if in_backward():
            return self._repetitions.chosen()
        self._check(way)
        top_k, factor = tokens.expert_ids_TK.shape[1], tokens.capacity_factor
        usual = self.usual
        if self.chooser is not None and way == AS_USUAL:  # a call that says how it goes is no trial
            usual = self.chooser.way(self, top_k, factor)
        route_degree, num_parts, all_to_all, replicated = [
            mine if given is None else given
            for given, mine in zip(vars(way).values(), vars(usual).values(), strict=True)
        ]
        route_degree = make_split(self.storage.degrees, route_degree).route_degree
        if all_to_all == "auto":
            all_to_all = self._faster(route_degree, tokens)
        counts = self.load.counts() if replicated else None
        hot = () if counts is None else hottest(counts, replicated)
        is_flat = all_to_all == "flat"
        num_pieces = 1 if is_flat else self.num_pieces(top_k, tokens.x_TD, num_parts)
        return Chosen(route_degree, num_parts, is_flat, hot, num_pieces)

    def num_pieces(self, top_k: int, x_TD: Tensor, num_parts: int) -> int:
        """Pieces in which a part of a call's tokens goes across nodes; the same on all ranks.

        Args:
            top_k: K.
            x_TD: of the call; only its width and type count, because ranks may have different numbers of tokens.
            num_parts: of the call.
        """
        load = self.load.token_load(top_k)
        num_tokens = FIRST_TOKENS if load is None else load.num_tokens
        size = num_tokens / num_parts * x_TD.shape[1] * x_TD.element_size()
        return max(1, min(round(size / PIECE_BYTES), MAX_PIECES))

    def _faster(self, route_degree: int, tokens: Dispatched) -> str:
        """The faster all-to-all by the cost model, from numbers that all ranks have in common."""
        if route_degree == 1 or self.exchanges is not None:
            return "flat"
        route = route_shape(make_split(self.storage.degrees, route_degree), self.nodes)
        if not route.has_two_levels:
            return "flat"
        x_TD, top_k = tokens.x_TD, tokens.expert_ids_TK.shape[1]
        load = self.load.token_load(top_k, tokens.capacity_factor)
        if load is None:
            load = TokenLoad.even(FIRST_TOKENS, top_k, self.num_experts)
        sizes = {"dim": x_TD.shape[1], "element_bytes": x_TD.element_size()}
        out_bytes = row_bytes(**sizes, payload=self.dispatch_dtype)
        return faster_all_to_all(route, load, self.network, **sizes, out_bytes=out_bytes)


@reads_former_names
def spread_experts(
    layer: MoELayer,
    world: World,
    *,
    num_replicas: int = 1,
    es_degree: int | None = None,
    order: ExpertOrder = "slices_inner",
    route_degree: int | None = None,
    keep: Keep = "until_backward",
    fixed_tokens: int | None = None,
    overlap_degree: int = 1,
    all_to_all: AllToAll = "flat",
    replicated_experts: int = 0,
    nodes: Sequence[int] | None = None,
    network: Network = USUAL_NETWORK,
    exchanges: Callable[[Route], Exchange] | None = None,
    dispatch_dtype: DispatchDtype = "same",
    offload: bool = False,
    prefetcher: Prefetcher | None = None,
) -> ExpertDispatcher:
    """Spread the experts of one layer over ranks, in place. Every rank must call.

    The layer then expects each rank's own tokens; router, shared experts and residual MLP stay as they are, and their
    gradients are this rank's share (sum them over ranks). The loss of all is the sum of the ranks' losses.

    Args:
        layer: with the same parameters on all ranks, or on the meta device. Of experts that are modules of the user's, each
            rank keeps some as they are.
        world: the ranks.
        num_replicas: copies of the experts; each is spread over world.size / num_replicas ranks.
        es_degree: slices of each expert; None: as few as possible.
        order: which ranks hold which part, see `ExpertDegrees`.
        route_degree: see `DispatchOptions`.
        keep: see `ExpertStorage`.
        fixed_tokens: see `ExpertDispatcher`.
        overlap_degree: see `DispatchOptions`.
        all_to_all: see `DispatchOptions`.
        replicated_experts: see `DispatchOptions`.
        nodes: see `ExpertDispatcher`.
        network: see `ExpertDispatcher`.
        exchanges: see `ExpertDispatcher`.
        dispatch_dtype: see `ExpertDispatcher`.
        offload: keep the experts' parameters, gradients and optimiser state in host memory; the world's groups need a
            backend for the CPU then. Build the optimiser afterwards.
        prefetcher: one for all layers of a model that run one after the other, so that weights are gathered one layer
            ahead; None: they are gathered when the layer is called.

    Returns:
        The dispatcher that the layer now has.

    Raises:
        ConfigError: the degrees do not fit, or the layer is spread already.
    """
    way = DispatchOptions(route_degree, overlap_degree, all_to_all, replicated_experts)
    degrees = check_spread(
        layer,
        world.size,
        num_replicas=num_replicas,
        es_degree=es_degree,
        order=order,
        keep=keep,
        way=way,
        fixed_tokens=fixed_tokens,
        nodes=nodes,
        dispatch_dtype=dispatch_dtype,
        offload=offload,
    )
    experts, name = layer.experts, f"layer {layer.layer_index}"
    storage: ExpertShards
    if isinstance(experts, GroupedExperts):
        device = compute_device(world.device_type) if offload else None
        storage = ExpertStorage(
            experts, world, degrees, keep=keep, layer=name, prefetcher=prefetcher, device=device
        )
    else:
        storage = ExpertModules(experts, world, degrees, layer=name)
        layer.experts = storage.modules
    layer.dispatcher = dispatcher = ExpertDispatcher(
        storage,
        num_experts=layer.num_experts,
        way=way,
        fixed_tokens=fixed_tokens,
        nodes=nodes,
        network=network,
        exchanges=exchanges,
        dispatch_dtype=dispatch_dtype,
    )
    return dispatcher
