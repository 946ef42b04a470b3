"""Model of the step time of a MoE layer spread over ranks, for given dispatch options."""

from dataclasses import dataclass

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import (
    Network,
    RouteShape,
    TokenLoad,
    TravelTime,
    ring_seconds,
    travel_time,
)
from expertmesh.costs.eplb import hottest

ROWS_OF_A_PART = 40
"""Rows whose time each part of the tokens costs an expert in addition, for reading its weights and adding its gradient:
docs/log.md, what a part costs."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a MoE layer on W ranks."""

    num_experts: int  # E
    dim: int  # D
    hidden_dim: int  # F
    num_matrices: int  # matrices of an expert: 2, or 3 of a gated one
    element_bytes: int  # bytes of an element of a dispatched token and of a gathered weight
    gradient_bytes: int  # bytes of an element of a weight's gradient
    num_ranks: int  # W, the ranks that hold one copy
    num_gathers: int = 1  # gathers of the weights per step: 2 where the backward gathers again
    trains: bool = True  # whether there is a backward
    num_layers: int = 1  # number of such layers in the model, all of which keep activations until their backward

    @property
    def expert_elements(self) -> int:
        """Parameters of one expert."""
        return self.num_matrices * self.dim * self.hidden_dim


@dataclass(frozen=True)
class Machine:
    """Links and speed of a rank."""

    network: Network  # its links
    flops_per_s: float  # operations per second of its products
    # see `ROWS_OF_A_PART`; on a GPU the rows of a tile, since many tiles are not full
    rows_of_a_part: float = ROWS_OF_A_PART


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a layer: forward and, in training, backward."""

    products_s: float  # products of the rank with most rows, in all parts
    travel_s: float  # dispatch and combine of tokens
    weights_s: float  # gathers of weights and reductions of their gradients
    num_parts: int = 1  # number of parts that tokens travel in
    across_s: float = 0.0  # the share of travel_s between nodes

    @property
    def total_s(self) -> float:
        """Seconds of the step, where with n parts the longer of products and travel hides (n - 1) / n of the other."""
        n = self.num_parts
        hidden = (n - 1) / n * min(self.products_s, self.travel_s)
        return self.products_s + self.travel_s - hidden + self.weights_s


def _rows(dispatch: DispatchOptions, route: RouteShape, load: TokenLoad) -> tuple[tuple[int, ...], TokenLoad, float]:
    """(replicated experts, load that travels, rows of the rank with most rows)."""
    hot = hottest(load.shares, dispatch.replicated_experts or 0) if route.route_degree > 1 else ()
    moving = load.without(hot)
    fullest = max(moving.block_shares(route.num_blocks)) * route.num_blocks
    stay = sum(load.shares[e] for e in hot)
    return hot, moving, load.num_tokens * load.top_k * (fullest + stay)


def step_time(
    dispatch: DispatchOptions, route: RouteShape, layer: LayerShape, load: TokenLoad, machine: Machine
) -> StepTime:
    """Modelled time of one step of a layer."""
    network, W = machine.network, layer.num_ranks
    hot, moving, rows = _rows(dispatch, route, load)
    parts, here = dispatch.overlap_degree or 1, layer.num_experts / len(route.blocks)
    rows += machine.rows_of_a_part * parts * here
    passes = 3 if layer.trains else 1
    products_s = passes * rows * 2 * layer.expert_elements / machine.flops_per_s
    ways = 2 if layer.trains else 1
    travel = travel_time(
        dispatch.all_to_all or "flat",
        route,
        moving,
        network,
        dim=layer.dim,
        element_bytes=layer.element_bytes,
        parts=parts,
    )
    elements = here * layer.expert_elements
    link = network.across if route.gathers_across else network.inside
    weights_s = layer.num_gathers * ring_seconds(elements * layer.element_bytes, route.num_gathering, link)
    spans = len(route.members) > 1
    replica_link = network.across if spans else network.inside
    replicated = len(hot) * layer.expert_elements
    # A sum over all ranks is a reduce-scatter and a gather.
    weights_s += 2 * ring_seconds(replicated * layer.element_bytes, W, replica_link)
    if layer.trains:
        weights_s += ring_seconds(elements * layer.gradient_bytes, route.num_gathering, link)
        weights_s += 2 * ring_seconds(replicated * layer.gradient_bytes, W, replica_link)
    travel = TravelTime(ways * travel.inside_s, ways * travel.across_s)
    return StepTime(products_s, travel.total_s, weights_s, parts, travel.across_s)


def extra_bytes(dispatch: DispatchOptions, route: RouteShape, layer: LayerShape, load: TokenLoad) -> float:
    """Bytes that a rank needs for given dispatch options, beside the layers' shards.

    In training each layer keeps its arrived rows, the hot experts' weights, and gathered weights that the backward does
    not gather again. Gradients, and weights that are gathered again, are held for one layer at a time.
    """
    hot, _, rows = _rows(dispatch, route, load)
    here = layer.num_experts / len(route.blocks) if route.num_gathering > 1 else 0
    gathered, replicated = here * layer.expert_elements, len(hot) * layer.expert_elements
    row = layer.dim + layer.num_matrices * layer.hidden_dim
    if not layer.trains:
        return (rows * row + gathered + replicated) * layer.element_bytes
    is_kept = layer.num_gathers == 1
    kept = rows * row + replicated + gathered * is_kept
    one = gathered * (not is_kept) * layer.element_bytes
    one += (gathered + replicated) * layer.gradient_bytes
    return layer.num_layers * kept * layer.element_bytes + one
