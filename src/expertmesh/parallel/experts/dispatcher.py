"""Expert parallelism as a `TokenDispatcher`: an exchange moves tokens (all-to-all), a storage gathers weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, cast

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
from expertmesh.costs.eplb import hottest
from expertmesh.moe.dispatch import Dispatched, Experts, apply_experts
from expertmesh.moe.experts import ExpertList
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
    Ragged,
    Route,
)
from expertmesh.parallel.experts.fits import check_dispatch, check_options, check_spread
from expertmesh.parallel.experts.hierarchical import Hierarchical, Nodes
from expertmesh.parallel.experts.load_record import (
    FIRST_TOKENS,
    Chosen,
    LoadRecord,
    Repetitions,
    route_shape,
)
from expertmesh.parallel.experts.modules import ExpertModules
from expertmesh.parallel.experts.owned import refuse_engine
from expertmesh.parallel.experts.packed_shards import PackedShards
from expertmesh.parallel.experts.prefetch import Prefetcher, in_backward
from expertmesh.parallel.experts.replicated_experts import LocalTokens, without_hot
from expertmesh.parallel.experts.route_split import RouteSplit, make_split
from expertmesh.parallel.experts.storage import ExpertShards, ExpertStorage, Keep, WeightsInUse
from expertmesh.parallel.experts.tables import on_device
from expertmesh.parallel.offload import compute_device

_never_compiled = torch._disable_dynamo
"""Disables torch.compile: collectives cannot be traced, and decisions change per call. The public name would import the
compiler."""

PIECE_BYTES = 1 << 20
MAX_CHUNKS = 8
"""Pieces of tokens sent across nodes have about PIECE_BYTES each, and there are at most MAX_CHUNKS."""


class ShardedRoundTrip:
    """Dispatch of tokens and gather of weights of one call, under way. A `RoundTrip`.

    Args:
        dispatch_handles: dispatch handles of the parts of the tokens. While experts compute one part, the next is
            dispatched and the one before is combined.
        staying: choices of hot experts, computed while tokens travel; None: no hot experts.
        when_over: callbacks that receive the result at the end of the forward.
    """

    def __init__(
        self,
        dispatch_handles: Sequence[DispatchHandle],
        storage: ExpertShards,  # storage of the weights
        gathered: WeightsInUse | None,  # weights that are being gathered; None: the experts use their own
        staying: LocalTokens | None = None,
        when_over: Sequence[Callable[[Tensor], None]] = (),
    ) -> None:
        self._dispatch_handles, self._storage, self._gathered = dispatch_handles, storage, gathered
        self._staying, self._when_over = staying, when_over

    @_never_compiled
    def advance(self) -> None:
        """Send the rows once the other ranks' row counts are known."""
        with phase("dispatch"):
            self._dispatch_handles[0].advance()

    @_never_compiled
    def finish(self, experts: Experts) -> Tensor:
        """Run the experts on the tokens received, and combine the partial sums that are sent back."""
        self.advance()
        dispatch_handles, gathered = self._dispatch_handles, self._gathered
        hot_TD = None if self._staying is None else self._staying.finish(experts)
        parameters = None
        if gathered is not None:
            parameters = self._storage.finish_gather(gathered, num_calls=len(dispatch_handles))
        under_way: list[CombineHandle] = []
        found: list[Tensor] = []
        for dispatch_handle, following in zip_longest(dispatch_handles, dispatch_handles[1:]):
            with phase("dispatch"):
                if following is not None:
                    following.advance()
                tokens = dispatch_handle.finish()
            given = parameters
            if dispatch_handle is dispatch_handles[0] and gathered is not None and parameters is not None:
                # in the backward this part is last: no other part's matmuls are left to hide its exchange
                given = gathered.late(parameters) if dispatch_handle.travels else parameters
            y_RD = apply_experts(experts, tokens, given)
            with phase("combine"):
                if gathered is not None and following is None:  # the backward starts at this output
                    gathered.announce_backward(y_RD)
                under_way.append(dispatch_handle.start_home(y_RD))
                under_way[-1].advance()
                # combine one part late, so that the backward, in reverse order, also sends gradients one part ahead
                found += [combine_handle.finish() for combine_handle in under_way[:-1]]
                del under_way[:-1]
        with phase("combine"):
            found.append(under_way[0].finish())
            y_TD = found[0] if len(found) == 1 else torch.cat(found)
            y_TD = y_TD if hot_TD is None else y_TD + hot_TD
        for told in self._when_over:
            told(y_TD)
        return y_TD


class ExpertDispatcher:
    """Dispatches tokens to the ranks that hold a layer's experts. A `TokenDispatcher`.

    Args:
        dispatch: default dispatch options. Unset fields mean: over all ranks of one replica, in one part, flat.
            Hierarchical equals flat where all ranks that share tokens are on one node, or each on its own node.
        exchanges: factory of the exchange of a route, such as `partial(Fixed, bound=16)`, whose sizes the host never
            waits for; None: chosen among `Alone`, `Hierarchical` and `Ragged`.
        dispatch_dtype: dtype of dispatched tokens: their own ("same"), or 8 bits with a scale per 128 elements ("int8",
            "float8_e4m3"). Outputs and gradients travel in their own dtype.
    """

    def __init__(
        self,
        storage: ExpertShards,  # storage of the experts' parameters
        *,
        num_experts: int,  # E
        dispatch: DispatchOptions = AS_USUAL,
        nodes: Sequence[int] | None = None,  # node of each rank of the world; None: from torchrun
        network: Network = USUAL_NETWORK,  # links for the cost model of all_to_all="auto"
        exchanges: Callable[[Route], Exchange] | None = None,
        dispatch_dtype: DispatchDtype = "same",
    ) -> None:
        self.storage, self.num_experts, self.network = storage, num_experts, network
        self.dispatch_dtype: DispatchDtype = dispatch_dtype
        self.exchanges = exchanges
        self._nodes = None if nodes is None else tuple(nodes)
        self._everyone = storage.world.all_ranks()
        self._exchanges: dict[tuple[int, bool], Exchange] = {}
        self.load = LoadRecord(num_experts, num_ranks=storage.world.size)
        self.chooser: LayerChooser | None = None
        self._repetitions = Repetitions(storage.layer)
        check_dispatch(dispatch_dtype, nodes=nodes, num_ranks=storage.world.size)
        self._check(dispatch)
        usual = DispatchOptions(
            make_split(storage.degrees, dispatch.route_degree).route_degree,
            dispatch.overlap_degree or 1,
            dispatch.all_to_all or "flat",
            dispatch.replicated_experts or 0,
        )
        self.usual = usual

    def exchange(self, route_degree: int | None = None, *, is_flat: bool | None = None) -> Exchange:
        """Exchange of tokens for a route_degree, created on first use; every rank must call when it is first used.

        Args:
            route_degree: ranks that tokens travel over; None: the default.
            is_flat: flat (True) or hierarchical all-to-all; None: the default.
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
        """Whether every rank has all tokens (inference)."""
        return self.exchanges is AllReduceExchange

    def _usual_exchange(self, route: Route, *, is_flat: bool) -> Exchange:
        if route.group.size == 1:
            return Alone(route)
        if not is_flat:
            nodes = self._nodes_of(route)
            if 1 < len(nodes.members) < route.group.size:
                return Hierarchical(route, nodes)
        return Ragged(route)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node of each rank of the world; every rank must call."""
        return self.storage.world.nodes() if self._nodes is None else self._nodes

    def _nodes_of(self, route: Route) -> Nodes:
        """Nodes of the ranks of a route; every rank must call, because process groups are created."""
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
        """Sum over all ranks, replicas of the experts included; the first value of a call is the number of choices per
        expert.

        Where all ranks have the same tokens, each rank's value is the sum already.
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

    def _check(self, dispatch: DispatchOptions) -> None:
        """Raise ConfigError for options that no call can have."""
        check_options(
            dispatch,
            num_experts=self.num_experts,
            stay=self.storage.stay,
            has_exchange=self.exchanges is not None,
        )

    @_never_compiled
    def start(self, tokens: Dispatched, dispatch: DispatchOptions = AS_USUAL) -> ShardedRoundTrip:
        """Start to dispatch tokens and to gather weights; see `TokenDispatcher`."""
        chosen = self._choose(dispatch, tokens)
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
            # the experts cast in any case; casting first halves the bytes sent
            tokens = replace(tokens, x_TD=x_TD.to(cast))
        staying = None
        if replicated is not None:
            staying = LocalTokens(tokens, replicated, self.num_experts)
            tokens = without_hot(tokens, hot, self.num_experts)
        dispatch_handles = exchange.start_parts(tokens, chosen.num_parts, chosen.num_chunks)
        return ShardedRoundTrip(dispatch_handles, self.storage, gathered, staying, when_over)

    def _choose(self, dispatch: DispatchOptions, tokens: Dispatched) -> "Chosen":
        """Options of a call; a forward repeated by activation checkpointing gets the options of its first run."""
        self.load.begin(is_again=in_backward())
        if in_backward():
            return self._repetitions.chosen()
        self._check(dispatch)
        top_k, factor = tokens.expert_ids_TK.shape[1], tokens.capacity_factor
        usual = self.usual
        if self.chooser is not None and dispatch == AS_USUAL:  # a call with explicit options is no trial
            usual = self.chooser.choose(self, top_k, factor)
        route_degree, num_parts, all_to_all, replicated = [
            mine if given is None else given
            for given, mine in zip(vars(dispatch).values(), vars(usual).values(), strict=True)
        ]
        route_degree = make_split(self.storage.degrees, route_degree).route_degree
        if all_to_all == "auto":
            all_to_all = self._faster(route_degree, tokens)
        counts = self.load.counts() if replicated else None
        hot = () if counts is None else hottest(counts, replicated)
        is_flat = all_to_all == "flat"
        num_chunks = 1 if is_flat else self.num_chunks(top_k, tokens.x_TD, num_parts)
        return Chosen(route_degree, num_parts, is_flat, hot, num_chunks)

    def num_chunks(self, top_k: int, x_TD: Tensor, num_parts: int) -> int:
        """Number of chunks in which a part of the tokens crosses nodes; the same on all ranks.

        Args:
            x_TD: tokens of the call; only D and the dtype are used, because T may differ between ranks.
        """
        load = self.load.token_load(top_k)
        num_tokens = FIRST_TOKENS if load is None else load.num_tokens
        size = num_tokens / num_parts * x_TD.shape[1] * x_TD.element_size()
        return max(1, min(round(size / PIECE_BYTES), MAX_CHUNKS))

    def _faster(self, route_degree: int, tokens: Dispatched) -> str:
        """Faster all-to-all by the cost model, from numbers that are equal on all ranks."""
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
    overlap_degree: int = 1,
    all_to_all: AllToAll = "flat",
    replicated_experts: int = 0,
    nodes: Sequence[int] | None = None,
    network: Network = USUAL_NETWORK,
    exchanges: Callable[[Route], Exchange] | None = None,
    dispatch_dtype: DispatchDtype = "same",
    offload: bool = False,
    prefetcher: Prefetcher | None = None,
    plain: bool = False,
) -> ExpertDispatcher:
    """Shard the experts of one layer over ranks, in place. Every rank must call.

    The layer then takes each rank's own tokens. Router, shared experts and residual MLP are unchanged; their gradients
    are this rank's part and must be summed over ranks. The total loss is the sum of the ranks' losses.

    Args:
        layer: with the same parameters on all ranks, or on the meta device. If experts are user modules, each rank
            keeps some of them unchanged.
        world: the ranks.
        num_replicas: replicas of the experts; each is sharded over world.size / num_replicas ranks.
        es_degree: slices of each expert; None: as few as possible.
        order: assignment of parts to ranks, see `ExpertDegrees`.
        route_degree: see `DispatchOptions`.
        keep: see `ExpertStorage`.
        overlap_degree: see `DispatchOptions`.
        all_to_all: see `DispatchOptions`.
        replicated_experts: see `DispatchOptions`.
        nodes: see `ExpertDispatcher`.
        network: see `ExpertDispatcher`.
        exchanges: see `ExpertDispatcher`.
        dispatch_dtype: see `ExpertDispatcher`.
        offload: keep the experts' parameters, gradients and optimizer state in host memory; the world's groups then
            need a CPU backend. Build the optimizer afterwards.
        prefetcher: shared by all layers of a model, so that weights are gathered one layer ahead; None: weights are
            gathered when the layer is called.
        plain: see `ExpertShards`.

    Returns:
        The new dispatcher of the layer.

    Raises:
        ConfigError: the degrees do not fit, or the layer is sharded already.
    """
    dispatch = DispatchOptions(route_degree, overlap_degree, all_to_all, replicated_experts)
    degrees = check_spread(
        layer,
        world.size,
        num_replicas=num_replicas,
        es_degree=es_degree,
        order=order,
        keep=keep,
        dispatch=dispatch,
        has_exchange=exchanges is not None,
        nodes=nodes,
        dispatch_dtype=dispatch_dtype,
        offload=offload,
    )
    name, experts = f"layer {layer.layer_index}", layer.grouped
    ranks: Any = {"world": world, "degrees": degrees, "layer": name, "plain": plain}
    storage: ExpertShards
    if experts is None:
        storage = ExpertModules(cast(ExpertList, layer.experts), **ranks)
        layer.experts = storage.modules
    elif experts.format != "dense":
        storage = PackedShards(experts, route_degree=route_degree, **ranks)
    else:
        device = compute_device(world.device_type) if offload else None
        storage = ExpertStorage(
            experts,
            keep=keep,
            prefetcher=prefetcher,
            device=device,
            route_degree=route_degree,
            **ranks,
        )
    if not plain:
        layer.set_deepspeed_parallelism = partial(refuse_engine, name)  # type: ignore[assignment]
    layer.dispatcher = dispatcher = ExpertDispatcher(
        storage,
        num_experts=layer.num_experts,
        dispatch=dispatch,
        nodes=nodes,
        network=network,
        exchanges=exchanges,
        dispatch_dtype=dispatch_dtype,
    )
    return dispatcher
