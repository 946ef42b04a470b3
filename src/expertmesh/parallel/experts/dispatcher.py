"""Expert parallelism behind the layer's dispatcher protocol: tokens travel to their experts, partial sums come home.

A token goes once to each rank that holds an expert of its choice (once to each slice of one, where experts are
sliced), with its ids and weights; the rank returns one partial sum for it. Capacity and drops are settled before.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expertmesh.comm.all_to_all.flat import Counts, all_to_all, exchange_counts
from expertmesh.comm.collectives import all_gather, all_reduce
from expertmesh.comm.group import RankGroup
from expertmesh.comm.mesh import expert_degrees
from expertmesh.comm.world import World
from expertmesh.config.run import ExpertOrder
from expertmesh.errors import ConfigError
from expertmesh.moe.assignment import count_all_choices
from expertmesh.moe.dispatch import Dispatched
from expertmesh.moe.experts import GroupedExperts
from expertmesh.moe.layer import MoELayer
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata
from expertmesh.parallel.experts.gather import GatheredWeights
from expertmesh.parallel.experts.modules import ExpertModules, module_degrees
from expertmesh.parallel.experts.plan import Plan, make_plan
from expertmesh.parallel.experts.prefetch import Prefetcher
from expertmesh.parallel.experts.storage import ExpertHolder, ExpertStorage, Keep
from expertmesh.parallel.offload import compute_device


@dataclass(frozen=True)
class _Route:
    """One plan's way for tokens.

    Attributes:
        plan: it.
        group: ranks that share their tokens.
        first_expert: of this rank.
        num_local: experts that this rank computes.
        places: rank in the group of [block of experts][slice].
    """

    plan: Plan
    group: RankGroup
    first_expert: int
    num_local: int
    places: list[list[int]]


@dataclass(frozen=True)
class _WayBack:
    """What `combine` needs: of a ragged exchange the rows' order and numbers, of a fixed one nothing but the sizes."""

    route: _Route
    num_tokens: int
    metadata: RouteMetadata | None = None
    counts: Counts | None = None
    slots: int = 1
    use: GatheredWeights | None = None


class ExpertDispatcher:
    """Routes tokens over the ranks that hold a layer's experts. A `TokenDispatcher`.

    Args:
        storage: of the experts' parameters.
        num_experts: E.
        route_degree: ranks that a token may travel over unless a call says otherwise; None: all of one copy.
        fixed_tokens: None: ragged exchanges, whose sizes the host waits for. A number: no rank has more tokens in a
            call; every rank sends that many to each, so that the host never waits: for decoding a few tokens at a time.

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
    ) -> None:
        self.storage, self.num_experts = storage, num_experts
        self.route_degree = make_plan(storage.degrees, route_degree).route_degree
        self.fixed_tokens = fixed_tokens
        self._everyone = storage.world.everyone()
        self._routes: dict[int, _Route] = {}

    def route(self, route_degree: int | None = None) -> _Route:
        """The way under a plan; every rank must ask when a plan is used first.

        Raises:
            ConfigError: route_degree does not divide the ranks.
        """
        degree = self.route_degree if route_degree is None else route_degree
        if degree not in self._routes:
            self._routes[degree] = self._new_route(make_plan(self.storage.degrees, degree))
        return self._routes[degree]

    def _new_route(self, plan: Plan) -> _Route:
        cells = plan.route_cells()
        members = next(cell for cell in cells if self.storage.rank in cell)
        places = [[0] * plan.route_f for _ in range(plan.route_e)]
        for place, rank in enumerate(members):
            block, part = plan.block(rank)
            places[block][part] = place
        num_local = self.num_experts // plan.route_e
        first = plan.block(self.storage.rank)[0] * num_local
        group = self.storage.group(cells, "the ranks that share tokens")
        return _Route(plan, group, first, num_local, places)

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Sum over all ranks, copies of the experts included."""
        return all_reduce(value, self._everyone, where=f"{self.storage.layer}, statistics")

    def dispatch(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None = None,
        route_degree: int | None = None,
    ) -> Dispatched:
        """Send tokens to their experts, and gather the weights meanwhile; see `TokenDispatcher`.

        Raises:
            ConfigError: route_degree does not divide the ranks, or there are more tokens than `fixed_tokens`.
            CollectiveError: a rank is gone or late.
        """
        route = self.route(route_degree)
        cast = autocast_dtype(x_TD.device)
        cast = None if x_TD.dtype == torch.float64 else cast
        use = self.storage.start_gather(route.plan, cast)
        if cast is not None and self.storage.casts_tokens:
            x_TD = x_TD.to(cast)  # the experts would do so; on the way it is half the bytes
        if route.group.size == 1:
            back = _WayBack(route, x_TD.shape[0])
            sent = Dispatched(x_TD, expert_ids_TK, weights_TK, max_rows, handle=back)
        elif self.fixed_tokens is not None:
            sent = self._dispatch_fixed(x_TD, expert_ids_TK, weights_TK, route, self.fixed_tokens)
        else:
            sent = self._dispatch_ragged(x_TD, expert_ids_TK, weights_TK, route)
        if use is None:
            return sent
        assert isinstance(sent.handle, _WayBack)
        return replace(
            sent,
            parameters=self.storage.finish_gather(use),
            handle=replace(sent.handle, use=use),
        )

    def _dispatch_ragged(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, route: _Route
    ) -> Dispatched:
        block_TK = torch.where(
            ids_TK < self.num_experts, ids_TK // route.num_local, route.plan.route_e
        )
        places_BQ = torch.tensor(route.places, device=ids_TK.device)
        destination_TS = _destinations(block_TK, places_BQ, route.group.size)
        metadata = route_metadata(destination_TS, route.group.size)
        counts = self._exchange_counts(metadata, block_TK, places_BQ, route)
        num_rows = sum(counts.send)
        metadata = replace(
            metadata,
            token_of_row_N=metadata.token_of_row_N[:num_rows],
            slot_of_row_N=metadata.slot_of_row_N[:num_rows],
        )
        local_RK, weights_RK = self._choices_of_rows(
            ids_TK, weights_TK, metadata, counts, route, places_BQ
        )
        where = f"{self.storage.layer}, dispatch"
        # Ids up to 2^24 are exact in FP32, so that they travel with the weights.
        both_RK = torch.cat((weights_RK, local_RK.to(weights_RK.dtype)), 1)
        both_RK = all_to_all(both_RK, counts, route.group, where=where)
        x_RD = all_to_all(permute(x_TD, metadata), counts, route.group, where=where)
        K = ids_TK.shape[1]
        back = _WayBack(route, x_TD.shape[0], metadata, counts, destination_TS.shape[1])
        return Dispatched(
            x_RD,
            both_RK[:, K:].detach().to(torch.int64),
            both_RK[:, :K],
            counts.more[0],
            handle=back,
        )

    def _exchange_counts(
        self, metadata: RouteMetadata, block_TK: Tensor, places_BQ: Tensor, route: _Route
    ) -> Counts:
        """Rows to each rank, and live slots, so that the receiver can size its buffers."""
        rows_P = metadata.offsets_E.diff().to(torch.int64)
        slots_B = count_all_choices(block_TK, route.plan.route_e)
        slots_P = torch.empty_like(rows_P)
        slots_P[places_BQ.flatten()] = slots_B.repeat_interleave(route.plan.route_f)
        both_PC = torch.stack((rows_P, slots_P), 1)
        return exchange_counts(both_PC, route.group, where=f"{self.storage.layer}, dispatch")

    def _choices_of_rows(
        self,
        ids_TK: Tensor,
        weights_TK: Tensor,
        metadata: RouteMetadata,
        counts: Counts,
        route: _Route,
        places_BQ: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Ids local to the receiver (its number of experts where the choice is not its own) and weights, per row."""
        first_P = torch.empty(route.group.size, dtype=torch.int64, device=ids_TK.device)
        blocks = torch.arange(route.plan.route_e, device=ids_TK.device)
        first_P[places_BQ.flatten()] = (blocks * route.num_local).repeat_interleave(
            route.plan.route_f
        )
        send = torch.tensor(counts.send, device=ids_TK.device)
        first_R = first_P.repeat_interleave(send, output_size=sum(counts.send))
        local_RK = ids_TK[metadata.token_of_row_N] - first_R[:, None]
        mine_RK = (local_RK >= 0) & (local_RK < route.num_local)
        local_RK = torch.where(mine_RK, local_RK, route.num_local)
        if weights_TK.dtype not in (torch.float32, torch.float64):
            weights_TK = weights_TK.float()
        return local_RK, permute(weights_TK, metadata) * mine_RK

    def _dispatch_fixed(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, route: _Route, bound: int
    ) -> Dispatched:
        """Every rank gets all tokens, padded to the bound, and leaves those of other ranks alone."""
        T, K = ids_TK.shape
        if bound < T:
            raise ConfigError(
                f"{T} tokens on this rank with fixed_tokens={bound}; raise fixed_tokens, or leave it out"
            )
        missing = (0, 0, 0, bound - T)
        where = f"{self.storage.layer}, dispatch"
        weights_TK = weights_TK if weights_TK.dtype == torch.float64 else weights_TK.float()
        both_TK = torch.cat((weights_TK, ids_TK.to(weights_TK.dtype)), 1)
        pad = nn.functional.pad
        # The value is an id beyond all experts, and a weight that nobody uses.
        both_BK = pad(both_TK, missing, value=float(self.num_experts))
        both_RK = all_gather(both_BK, route.group, where=where).flatten(0, 1)
        x_RD = all_gather(pad(x_TD, missing), route.group, where=where).flatten(0, 1)
        local_RK = both_RK[:, K:].detach().to(torch.int64) - route.first_expert
        mine_RK = (local_RK >= 0) & (local_RK < route.num_local)
        local_RK = torch.where(mine_RK, local_RK, route.num_local)
        back = _WayBack(route, T)
        return Dispatched(x_RD, local_RK, both_RK[:, :K] * mine_RK, None, handle=back)

    def combine(self, y_TD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the partial sums home and add them per token, in FP32 (FP64 for FP64) and a fixed order."""
        back: _WayBack = dispatched.handle
        if back.use is not None:
            back.use.announce_backward(y_TD)
        if back.route.group.size == 1:
            return y_TD
        where = f"{self.storage.layer}, combine"
        if back.metadata is None or back.counts is None:
            home_RD = all_to_all(y_TD, None, back.route.group, where=where)
            parts_PTD = home_RD.unflatten(0, (back.route.group.size, -1))[:, : back.num_tokens]
            exact = accumulate_dtype(y_TD.dtype)
            return parts_PTD.to(exact).sum(0).to(y_TD.dtype)
        home_RD = all_to_all(y_TD, back.counts.mirrored(), back.route.group, where=where)
        return combine(home_RD, back.metadata, back.slots)


def _destinations(block_TK: Tensor, places_BQ: Tensor, none: int) -> Tensor:
    """(T, S) ranks that each token goes to, each once, and `none` in empty places.

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
        block_TS = torch.arange(num_blocks, device=block_TK.device).expand(T, -1)
        block_TS = torch.where(chosen, block_TS, num_blocks)
    else:
        same_TKK = block_TK[:, :, None] == block_TK[:, None, :]
        again_TK = same_TKK.tril(-1).any(-1)
        block_TS = block_TK.masked_fill(again_TK, num_blocks)
    table = torch.cat((places_BQ, places_BQ.new_full((1, num_slices), none)))
    return table[block_TS].flatten(1)


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
    )
    layer.dispatcher = dispatcher
    return dispatcher
