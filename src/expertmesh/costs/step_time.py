"""Time of a training step, by part, on one rank of a cluster: a roofline with eight fitted constants (docs/planner.md).

`raw_step` counts seconds at the devices' peaks. `step_seconds` divides them by the efficiency of software
(`Efficiency`) and leaves out overlapping parts. MoE layers are modelled by `layer_time`, which also chooses dispatch
options at run time.
"""

from dataclasses import dataclass, fields, replace
from functools import cache, partial

from expertmesh.config.cluster import Cluster
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import RouteShape, TokenLoad, ring_seconds
from expertmesh.costs.hardware import network_of
from expertmesh.costs.layer_time import LayerShape, Machine, step_time
from expertmesh.costs.rank_layout import ONE_HOT_MASK_BYTES, OURS, RankLayout, Workload
from expertmesh.costs.sizes import LayerSizes, ModelSizes
from expertmesh.costs.state_bytes import OTHERS

HBM = 0.8
"""Share of the memory's bandwidth that element-wise kernels reach (ai-dynamo/aiconfigurator)."""
ATTENTION = 0.5
"""Share of the BF16 peak that causal attention reaches."""
FP8_SHARE = 0.75
"""Share of the peak that FP8 reaches, relative to the share of BF16: quantising takes time, and router and attention
stay in BF16."""
FP8_LAUNCHES = 2.0
"""Launches of an eager layer in FP8 relative to BF16: both operands of every product are quantised by kernels of their
own."""
ADAPTER_LAUNCHES = 1.5
"""Launches of a layer with adapters relative to one without: two small products and a sum beside each of its
products."""
ADAM_BYTES = 28
"""Bytes that AdamW reads and writes per parameter: weight, gradient and two moments in FP32, and a copy in BF16."""


@dataclass(frozen=True)
class Efficiency:
    """Efficiency of software on the hardware: the fitted constants, each with its bounds in `BOUNDS`."""

    dense: float = 0.4221  # share of the peak that large dense products reach
    grouped: float = 0.7392  # share of the peak that products of experts reach when their tiles are full
    network: float = 0.9651  # share of the links' bandwidth that collectives reach
    # bytes that element-wise kernels move per token, layer and element of D, forward and backward
    element_bytes: float = 152.3
    host_s: float = 0.003144  # CPU seconds per layer and micro-batch, forward and backward, with a launch per operation
    fused_host: float = 0.4153  # share of host_s that is left with fused operators and CUDA graphs
    old: float = 0.7907  # speed of compute with stacks of 2021, relative to today's
    hidden: float = 0.9  # share of overlappable communication that is hidden


def efficiency_of(cluster: Cluster, usual: Efficiency | None = None) -> Efficiency:
    """Efficiency of software on a cluster: its measured constants, and the usual ones for the rest."""
    given = {k: v for k, v in vars(cluster.software).items() if v is not None}
    return replace(usual or Efficiency(), **given)


USUAL = Efficiency(0.6, 0.6, 0.85, 130.0, 2e-3, 0.25, 0.85, 0.6)
"""Constants measured one by one: products, NCCL tables, eager layers of PyTorch. A fit starts from them, and is drawn
towards them."""

BOUNDS = {
    "dense": (0.4, 0.85),
    "grouped": (0.35, 0.85),
    "network": (0.6, 1.0),
    "element_bytes": (60.0, 300.0),
    "host_s": (0.5e-3, 4e-3),
    "fused_host": (0.05, 0.8),
    "old": (0.6, 1.1),
    "hidden": (0.2, 0.9),
}
"""(least, largest) value of each constant in a fit."""


@dataclass(frozen=True)
class RawStep:
    """Seconds at the hardware's peaks: per micro-batch, or once per step where the part says so."""

    dense_s: float  # dense products, the logits among them
    grouped_s: float  # products of experts on the fullest rank
    attention_s: float  # products of attention with keys and values
    element_s: float  # element-wise kernels, for one byte per token, layer and element of D
    rows_s: float  # element-wise kernels on the rows of experts, and on logits
    one_hot_s: float  # dispatch by one-hot products
    exchange_inside_s: float  # all-to-all of tokens within nodes
    exchange_across_s: float  # all-to-all of tokens between nodes
    tensor_s: float  # collectives of tensor parallelism
    gathers_s: float  # gathers of weights and reductions of gradients of each micro-batch
    step_gathers_s: float  # gathers and reductions once per step
    offload_s: float  # copies between host and device, each micro-batch
    sends_s: float  # activations and their gradients to the neighbouring pipeline stages
    host_layers: float  # number of layers whose kernels the CPU launches, in forward and backward
    step_layers: float  # number of layers whose update, clipping and zeroing it launches once per step
    optimizer_s: float  # optimizer update, once per step
    bubble: float  # time that a pipeline waits, as a share of the micro-batches' time
    overlap_degree: int  # number of parts that tokens travel in
    accumulation: int  # micro-batches of a step
    stack: str  # see `Workload`

    def network_s(self, e: Efficiency) -> float:
        """Seconds in which links carry what a step sends, hidden or not: no step is shorter."""
        links = self.exchange_inside_s + self.exchange_across_s + self.tensor_s + self.gathers_s
        each = (links + self.sends_s) / e.network + self.offload_s
        return self.accumulation * each + self.step_gathers_s / e.network


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by part, hidden communication left out."""

    dense_s: float  # dense products
    grouped_s: float  # products of experts
    attention_s: float  # products of attention with keys and values
    element_s: float  # element-wise kernels
    one_hot_s: float  # dispatch by one-hot products
    exchange_inside_s: float  # all-to-all of tokens within nodes
    exchange_across_s: float  # all-to-all of tokens between nodes
    tensor_s: float  # collectives of tensor parallelism
    zero_s: float  # gathers of weights and reductions of gradients
    optimizer_s: float  # optimizer update
    offload_s: float  # copies between host and device
    sends_s: float  # activations between pipeline stages
    host_s: float  # kernel launches of the CPU
    bubble_s: float  # pipeline bubble

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        result: float = sum(getattr(self, field.name) for field in fields(self))
        return result


def raw_step(sizes: ModelSizes, layout: RankLayout, work: Workload, cluster: Cluster) -> RawStep:
    """Seconds of a step's parts at the hardware's peaks."""
    device, stages = cluster.device, layout.pp_degree
    peak, hbm = device.reached_per_s(work.precision), HBM * device.hbm_bytes_per_s
    wide = device.reached_per_s("float32" if work.precision == "float32" else "bfloat16")
    of_sequence = layout.micro_batch * work.seq_len / (layout.tp_degree * layout.cp_degree)
    D, passes, b = sizes.dim, layout.passes, work.element_bytes
    rests = sizes.learning_share < 1  # weights that rest have no gradients
    sums = dict.fromkeys((f.name for f in fields(RawStep) if f.type is float), 0.0)
    for block in sizes.blocks:
        n, T = block.count / stages, of_sequence * block.token_share
        dense = block.attention_elements + block.dense_elements + D * block.num_experts
        again = block.recomputed_elements(layout.recomputed)
        sums["dense_s"] += n * 2 * T * ((passes - rests) * dense + again) / peak
        seen = block.keys_seen(work.seq_len)
        more = 0.5 + ("core_attn" in layout.recomputed)
        sums["attention_s"] += n * (passes + more) * 2 * T * block.score_width * seen
        sums["element_s"] += n * passes / 3 * T * D / hbm
        sums["rows_s"] += n * passes / 3 * T * 4 * block.num_matrices * block.dense_hidden * b / hbm
        sums["host_layers"] += n * passes / 3 * (ADAPTER_LAUNCHES if rests else 1)
        sums["tensor_s"] += n * passes / 3 * _tensor_s(T, D * b, layout, cluster)
        if block.num_experts:
            for name, seconds in _expert_parts(sizes, block, T, layout, work, cluster).items():
                sums[name] += n * seconds
    sums["attention_s"] /= ATTENTION * wide
    T = of_sequence * sizes.logit_share
    if work.precision == "float8":
        sums["dense_s"] /= FP8_SHARE
        sums["grouped_s"] /= FP8_SHARE
        if work.stack == "eager":
            sums["host_layers"] *= FP8_LAUNCHES
    sums["dense_s"] += (3 - rests) * 2 * T * D * sizes.vocab_size / wide / stages
    sums["rows_s"] += T * sizes.vocab_size * 16 / hbm / stages
    widened = sizes.widened_bytes / layout.route_degree / stages
    sums["rows_s"] += (passes - rests) * widened / hbm
    sums["sends_s"] = _sends_s(of_sequence * D * b, layout, cluster)
    sums["step_layers"] = sizes.num_layers / stages if work.on_gpu else 0.0
    weights = _weights(sizes, layout, work, cluster)
    bubble = (stages - 1) / (layout.accumulation * layout.virtual_stages)
    return RawStep(
        **(sums | weights | {"bubble": bubble}),
        overlap_degree=layout.overlap_degree,
        accumulation=layout.accumulation,
        stack=work.stack,
    )


def _tensor_s(T: float, row_bytes: float, layout: RankLayout, cluster: Cluster) -> float:
    """Seconds of the all-gathers and reduce-scatters around attention and MLP, forward and backward (Megatron's
    sequence parallelism)."""
    tp = layout.tp_degree
    if tp == 1:
        return 0.0
    network = network_of(cluster)
    link = network.inside if tp <= cluster.node_size else network.across
    return 8 * ring_seconds(T * tp * row_bytes, tp, link)


def _sends_s(num_bytes: float, layout: RankLayout, cluster: Cluster) -> float:
    """Seconds of a micro-batch's activations to the next pipeline stage, and of gradients back, for each virtual
    stage."""
    if layout.pp_degree == 1:
        return 0.0
    spans = layout.num_ranks > cluster.node_size
    link = cluster.across if spans else cluster.inside
    return 2 * layout.virtual_stages * (num_bytes / link.bytes_per_s + link.latency_s)


@cache
def route_of(route_degree: int, es_degree: int, node_size: int) -> RouteShape:
    """`RouteShape` of neighbouring ranks, the slices of a block innermost."""
    blocks = route_degree // es_degree
    return RouteShape(
        route_degree=route_degree,
        blocks=tuple(place // es_degree for place in range(route_degree)),
        num_blocks=blocks,
        nodes=tuple(place // node_size for place in range(route_degree)),
    )


@cache
def _even(top_k: float, num_experts: int, merges: bool) -> TokenLoad:
    return replace(TokenLoad.even(1.0, max(1, round(top_k)), num_experts), merges=merges)


@dataclass(frozen=True)
class _LayerLine:
    """Seconds of a layer per token of a rank, and per part of the tokens: (products, travel within nodes, travel
    between nodes)."""

    per_token: tuple[float, float, float]
    per_part: tuple[float, float, float]


@cache
def _layer_line(kind: str, route: RouteShape, load: TokenLoad, shape: LayerShape, machine: Machine) -> _LayerLine:
    """The line through `layer_time.step_time` at no token and at many: the time is linear in tokens."""
    many = 1e6
    dispatch = DispatchOptions(route.route_degree, 1, kind, 0)  # type: ignore[arg-type]
    none, some = (step_time(dispatch, route, shape, replace(load, num_tokens=n), machine) for n in (0.0, many))
    fixed = none.products_s, none.travel_s - none.across_s, none.across_s
    found = some.products_s, some.travel_s - some.across_s, some.across_s
    per_token = tuple((s - f) / many for s, f in zip(found, fixed, strict=True))
    return _LayerLine(per_token, fixed)  # type: ignore[arg-type]


def _expert_parts(
    sizes: ModelSizes,
    block: LayerSizes,
    T: float,
    layout: RankLayout,
    work: Workload,
    cluster: Cluster,
) -> dict[str, float]:
    """Seconds of one MoE layer's experts for one micro-batch, by part of `RawStep`."""
    device, D, b = cluster.device, sizes.dim, work.element_bytes
    hbm = HBM * device.hbm_bytes_per_s
    peak = device.reached_per_s(work.precision)
    slices = layout.slices_of(block.num_experts)
    route = route_of(layout.route_degree, slices, cluster.node_size)
    shape = LayerShape(
        num_experts=block.num_experts,
        dim=D,
        hidden_dim=block.hidden_dim,
        num_matrices=block.num_matrices,
        element_bytes=b,
        gradient_bytes=4,
        num_ranks=layout.stage_ranks,
    )
    line = _layer_line(
        layout.all_to_all,
        route,
        _even(block.rows_per_token, block.num_experts, work.merges),
        shape,
        Machine(network_of(cluster), peak, device.rows_of_a_part),
    )
    factor, parts = work.imbalance * work.capacity_factor, layout.overlap_degree
    grouped, inside, across = (
        factor * T * token + parts * part for token, part in zip(line.per_token, line.per_part, strict=True)
    )
    again = 4 / 3 if layout.checkpointing in ("full", "moe") else 1.0
    first_product = (block.num_matrices - 1) / block.num_matrices / 3
    products = (
        again - (1 / 3 if sizes.learning_share < 1 else 0) + (first_product if layout.checkpointing == "experts" else 0)
    )
    trips = 1.5 if layout.checkpointing in ("full", "moe") else 1.0
    trips *= 0.75 if work.eight_bit_dispatch else 1.0  # two of the four all-to-alls are dispatches
    rows = T * block.rows_per_token * factor
    found = {
        "grouped_s": products * grouped,
        "rows_s": again * 10 * rows * (D + block.hidden_dim) * b / hbm,
        "exchange_inside_s": trips * inside,
        "exchange_across_s": trips * across,
    }
    if work.one_hot:  # T x (E C) masks, and products with them in encode and decode
        found["one_hot_s"] = (layout.passes - 1) * 4 * T * rows * D / peak + again * ONE_HOT_MASK_BYTES * T * rows / hbm
    return found


def _weights(sizes: ModelSizes, layout: RankLayout, work: Workload, cluster: Cluster) -> dict[str, float]:
    """Seconds of one rank's weight gathers, gradient reductions, offload copies and update, by part of `RawStep`."""
    device, stages, b = cluster.device, layout.pp_degree, work.element_bytes
    other = OTHERS.get(work.states)
    gradient = (4 if other is None else other.gradient) * sizes.learning_share
    dense = sizes.dense_parameters / stages / layout.tp_degree
    experts = sizes.expert_parameters / stages / layout.route_degree
    shard, replicas, copies = layout.shard_degree, layout.num_replicas, layout.dp_replicate_degree
    layers = sizes.num_layers / stages
    moe_layers = sum(block.count for block in sizes.blocks if block.num_experts) / stages
    gathers = 2 if layout.zero_stage == 3 else 1  # recomputation and backward share a gather
    of_dense = partial(_collective_s, cluster, ranks=shard, stride=layout.tp_degree)
    of_experts = partial(_collective_s, cluster, ranks=replicas, stride=layout.route_degree)
    dense_gather = gathers * of_dense(dense * work.gathered_bytes, count=layers)
    dense_sum = of_dense(dense * gradient, count=layers)
    expert_gather = gathers * of_experts(experts * b, count=moe_layers)
    expert_sum = of_experts(experts * gradient, count=moe_layers)
    held = dense / shard + experts / replicas
    sums = 2 * _collective_s(cluster, held * gradient, ranks=copies, stride=layout.stage_ranks // copies, count=layers)
    # This project reduces experts' gradients in each pass; other software once per step where weights stay gathered.
    each, step = 0.0, sums
    if layout.zero_stage == 3 or work.states in OURS:
        each += expert_sum
    else:
        step += expert_sum
    if layout.zero_stage == 3:
        each += dense_gather + dense_sum + expert_gather
    elif layout.zero_stage == 2:
        each, step = each + dense_sum, step + dense_gather + expert_gather
    else:
        step += dense_gather + dense_sum + expert_gather
    held *= sizes.learning_share
    update = ADAM_BYTES * held / (HBM * device.hbm_bytes_per_s)
    offload = 0.0
    if layout.offload:
        offload = held * (4 + 4) / (cluster.host.gb_per_s * 1e9)
        update = held / cluster.host.adam_parameters_per_s
    return {
        "gathers_s": each,
        "step_gathers_s": step,
        "optimizer_s": update,
        "offload_s": offload,
    }


def _collective_s(cluster: Cluster, num_bytes: float, *, ranks: int, stride: int, count: float) -> float:
    """Seconds of all-gathers (or reduce-scatters) of so many bytes in all, over a ring of ranks that are `stride`
    apart."""
    if ranks == 1 or not num_bytes:
        return 0.0
    network, per_node = network_of(cluster), cluster.node_size
    in_node = max(1, min(ranks, per_node // stride))
    nodes = -(-ranks // in_node)
    hops = (ranks - nodes) * network.inside.latency_s + nodes * network.across.latency_s
    if nodes == 1:
        return num_bytes * (ranks - 1) / ranks / network.inside.bytes_per_s + count * (
            (ranks - 1) * network.inside.latency_s
        )
    # The ring uses the links of its own `in_node` ranks of a node; other rings use the rest.
    share = network.across.bytes_per_s / per_node * in_node
    return num_bytes * (ranks - 1) / ranks / share + count * hops


_GRAPHS = {"graphs": 0.5, "fused": 1.0, "whole_graph": 2.0}
"""Power of `fused_host` that is left of the CPU's time per layer, by kind of software; of others all is left."""


def step_seconds(raw: RawStep, e: Efficiency) -> StepSeconds:
    """Seconds of a step by part, with software of a known efficiency.

    All communication of a pass hides under that pass's compute, whose `hidden` share is one budget: the exchange takes
    of it first, then sends between stages, gathers and offload, and what is left hides the gathers of a step.
    """
    old = e.old if raw.stack == "2021" else 1.0
    m = raw.accumulation
    dense, grouped = raw.dense_s / e.dense / old, raw.grouped_s / e.grouped / old
    attention = raw.attention_s / old
    element = (raw.element_s * e.element_bytes + raw.rows_s) / old
    one_hot = raw.one_hot_s / e.dense / old
    inside, across = raw.exchange_inside_s / e.network, raw.exchange_across_s / e.network
    travel, n = inside + across, raw.overlap_degree
    launch = e.host_s * e.fused_host ** _GRAPHS.get(raw.stack, 0.0)
    host = launch * raw.host_layers
    compute = dense + grouped + attention + element + one_hot
    budget = _Budget(e.hidden * compute)
    overlapped = (n - 1) / n * min(travel, grouped + dense + attention)
    left = 1 - budget.hide(e.hidden * overlapped) / travel if travel else 0.0
    tensor = raw.tensor_s / e.network
    sends = budget.exposed(raw.sends_s / e.network)
    zero = m * budget.exposed(raw.gathers_s / e.network)
    offload = m * budget.exposed(raw.offload_s)
    zero += budget.exposed(raw.step_gathers_s / e.network)
    waiting = raw.bubble * m * (compute + travel * left + tensor + sends + host)
    return StepSeconds(
        dense_s=m * dense,
        grouped_s=m * grouped,
        attention_s=m * attention,
        element_s=m * element,
        one_hot_s=m * one_hot,
        exchange_inside_s=m * inside * left,
        exchange_across_s=m * across * left,
        tensor_s=m * tensor,
        zero_s=zero,
        optimizer_s=raw.optimizer_s,
        offload_s=offload,
        sends_s=m * sends,
        host_s=m * host + launch * raw.step_layers,
        bubble_s=waiting,
    )


class _Budget:
    """Compute of a pass under which communication can hide, each second once."""

    def __init__(self, seconds: float) -> None:
        """A budget of so many seconds."""
        self.left_s = seconds

    def hide(self, seconds: float) -> float:
        """Seconds of a communication that hide; the budget shrinks by them."""
        hidden = min(seconds, self.left_s)
        self.left_s -= hidden
        return hidden

    def exposed(self, seconds: float) -> float:
        """Seconds of a communication that do not hide."""
        return seconds - self.hide(seconds)
