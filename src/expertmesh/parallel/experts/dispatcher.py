"""Expert parallelism behind the layer's dispatcher protocol: an exchange moves tokens, a storage gathers weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from expertmesh.comm.collectives import all_reduce
from expertmesh.comm.mesh import expert_degrees
from expertmesh.comm.world import World
from expertmesh.config.run import ExpertOrder
from expertmesh.errors import ConfigError
from expertmesh.moe.dispatch import Experts, Tokens, apply_experts
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.phases import phase
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.parallel.experts.exchange import (
    Alone,
    Exchange,
    Fixed,
    Homebound,
    Outbound,
    Ragged,
    Route,
)
from expertmesh.parallel.experts.gather import GatheredWeights
from expertmesh.parallel.experts.modules import ExpertModules, module_degrees
from expertmesh.parallel.experts.plan import Plan, make_plan
from expertmesh.parallel.experts.prefetch import Prefetcher
from expertmesh.parallel.experts.storage import ExpertHolder, ExpertStorage, Keep
from expertmesh.parallel.offload import compute_device


class SpreadJourney:
    """Tokens and weights on their way to each other. A `Journey`.

    Args:
        outbounds: the tokens, in one part or several: while the experts compute on one, the next travels out and the one
            before travels home.
        storage: of the weights.
        gathered: weights that are being gathered; None: the experts have their own.
    """

    def __init__(
        self, outbounds: list[Outbound], storage: ExpertHolder, gathered: GatheredWeights | None
    ) -> None:
        self._outbounds, self._storage, self._gathered = outbounds, storage, gathered

    def advance(self) -> None:
        """Send the rows, as soon as the other ranks have said how many to expect.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        with phase("dispatch"):
            self._outbounds[0].advance()

    def finish(self, experts: Experts) -> Tensor:
        """Run the experts on the tokens of all ranks, and add up the partial sums that come home.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        self.advance()
        outbounds, gathered = self._outbounds, self._gathered
        parameters = None
        if gathered is not None:
            parameters = self._storage.finish_gather(gathered, num_calls=len(outbounds))
        under_way: list[Homebound] = []
        found: list[Tensor] = []
        for outbound, following in zip_longest(outbounds, outbounds[1:]):
            with phase("dispatch"):
                if following is not None:
                    following.advance()
                tokens = outbound.finish()
            y_RD = apply_experts(experts, tokens, parameters)
            with phase("combine"):
                if gathered is not None and following is None:  # the backward begins here
                    gathered.announce_backward(y_RD)
                under_way.append(outbound.start_home(y_RD))
                # one later, so that the backward, in the opposite order, sends gradients one ahead as well
                found += [homebound.finish() for homebound in under_way[:-1]]
                del under_way[:-1]
        with phase("combine"):
            found.append(under_way[0].finish())
            return found[0] if len(found) == 1 else torch.cat(found)


def _usual_exchange(route: Route, *, fixed_tokens: int | None) -> Exchange:
    if route.group.size == 1:
        return Alone(route)
    return Ragged(route) if fixed_tokens is None else Fixed(route, fixed_tokens)


class ExpertDispatcher:
    """Routes tokens over the ranks that hold a layer's experts. A `TokenDispatcher`.

    Args:
        storage: of the experts' parameters.
        num_experts: E.
        route_degree: ranks that a token may travel over unless a call says otherwise; None: all of one copy.
        fixed_tokens: None: ragged exchanges, whose sizes the host waits for. A number: no rank has more tokens in a
            call; every rank sends that many to each, so that the host never waits: for decoding a few tokens at a time.
        overlap_degree: parts that tokens travel in unless a call says otherwise; the results are equal but for rounding.
        exchanges: makes the exchange of a route; None: the one of this package that fits.

    Raises:
        ConfigError: route_degree does not divide the ranks.
    """

    def __init__(
        self,
        storage: ExpertHolder,
        *,
        num_experts: int,
        route_degree: int | None = None,
        fixed_tokens: int | None = None,
        overlap_degree: int = 1,
        exchanges: Callable[[Route], Exchange] | None = None,
    ) -> None:
        self.storage, self.num_experts = storage, num_experts
        self.route_degree = make_plan(storage.degrees, route_degree).route_degree
        self.overlap_degree = _checked_overlap(overlap_degree)
        self.exchanges = exchanges or partial(_usual_exchange, fixed_tokens=fixed_tokens)
        self._everyone = storage.world.everyone()
        self._exchanges: dict[int, Exchange] = {}

    def exchange(self, route_degree: int | None = None) -> Exchange:
        """What moves tokens under a plan; every rank must ask when a plan is used first.

        Raises:
            ConfigError: route_degree does not divide the ranks.
        """
        degree = self.route_degree if route_degree is None else route_degree
        if degree not in self._exchanges:
            route = self._new_route(make_plan(self.storage.degrees, degree))
            self._exchanges[degree] = self.exchanges(route)
        return self._exchanges[degree]

    def _new_route(self, plan: Plan) -> Route:
        cells = plan.route_cells()
        members = next(cell for cell in cells if self.storage.rank in cell)
        places = [[0] * plan.route_f for _ in range(plan.route_e)]
        for place, rank in enumerate(members):
            block, part = plan.block(rank)
            places[block][part] = place
        first = plan.block(self.storage.rank)[0] * (self.num_experts // plan.route_e)
        group = self.storage.group(cells, "the ranks that share tokens")
        return Route(plan, group, self.num_experts, first, places, self.storage.layer)

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Sum over all ranks, copies of the experts included."""
        return all_reduce(value, self._everyone, where=f"{self.storage.layer}, statistics")

    def start(
        self,
        tokens: Tokens,
        *,
        route_degree: int | None = None,
        overlap_degree: int | None = None,
    ) -> SpreadJourney:
        """Send tokens to their experts, and begin to gather weights; see `TokenDispatcher`.

        Raises:
            ConfigError: route_degree does not divide the ranks, overlap_degree is below 1, or there are more tokens than
                `fixed_tokens`.
            CollectiveError: a rank is gone or late.
        """
        exchange = self.exchange(route_degree)
        num_parts = self.overlap_degree
        if overlap_degree is not None:
            num_parts = _checked_overlap(overlap_degree)
        x_TD = tokens.x_TD
        cast = None if x_TD.dtype == torch.float64 else autocast_dtype(x_TD.device)
        gathered = self.storage.start_gather(exchange.route.plan, cast)
        if cast is not None and self.storage.casts_tokens:
            # the experts would do so; on the way it is half the bytes
            tokens = replace(tokens, x_TD=x_TD.to(cast))
        return SpreadJourney(exchange.start_parts(tokens, num_parts), self.storage, gathered)


def _checked_overlap(degree: int) -> int:
    if degree < 1:
        raise ConfigError(
            f"overlap_degree={degree}: must be at least 1; use 1 to send all tokens at once"
        )
    return degree


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
    exchanges: Callable[[Route], Exchange] | None = None,
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
        route_degree: see `ExpertDispatcher`.
        keep: see `ExpertStorage`.
        fixed_tokens: see `ExpertDispatcher`.
        overlap_degree: see `ExpertDispatcher`.
        exchanges: see `ExpertDispatcher`.
        offload: keep the experts' parameters, gradients and optimiser state in host memory; the world's groups need a
            backend for the CPU then. Build the optimiser afterwards.
        prefetcher: one for all layers of a model that run one after the other, so that weights are gathered one layer
            ahead; None: they are gathered when the layer is called.

    Returns:
        The dispatcher that the layer now has.

    Raises:
        ConfigError: the degrees do not fit.
    """
    experts = layer.experts
    if num_replicas < 1 or world.size % num_replicas:
        raise ConfigError(
            f"num_replicas={num_replicas}: must divide the {world.size} ranks; choose a divisor"
        )
    num_ranks, name = world.size // num_replicas, f"layer {layer.layer_index}"
    storage: ExpertHolder
    if isinstance(experts, GroupedExperts):
        degrees = expert_degrees(
            num_ranks,
            num_experts=layer.num_experts,
            hidden_dim=experts.w_in.shape[2],
            es_degree=es_degree,
            order=order,
        )
        make_plan(degrees, route_degree)
        device = compute_device(world.device_type) if offload else None
        storage = ExpertStorage(
            experts, world, degrees, keep=keep, layer=name, prefetcher=prefetcher, device=device
        )
    else:
        degrees = module_degrees(
            num_ranks,
            num_experts=layer.num_experts,
            es_degree=es_degree,
            route_degree=route_degree,
            offload=offload,
        )
        storage = ExpertModules(experts, world, degrees, layer=name)
        layer.experts = storage.modules
    dispatcher = ExpertDispatcher(
        storage,
        num_experts=layer.num_experts,
        route_degree=route_degree,
        fixed_tokens=fixed_tokens,
        overlap_degree=overlap_degree,
        exchanges=exchanges,
    )
    layer.dispatcher = dispatcher
    return dispatcher
