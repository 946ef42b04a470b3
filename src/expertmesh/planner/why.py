"""Reasons why neighbours of the best layout lost: each differs by one choice and lacks memory or takes longer."""

from collections.abc import Iterator
from dataclasses import fields, replace

from expertmesh.costs.memory import GIB
from expertmesh.costs.rank_layout import RankLayout
from expertmesh.costs.step_time import StepSeconds
from expertmesh.planner.search import Candidate, can_cut, checkpointings, routes_over

_WORDS = {
    "dense_s": "dense products",
    "grouped_s": "products of experts",
    "attention_s": "attention",
    "element_s": "element-wise",
    "one_hot_s": "one-hot dispatch",
    "exchange_inside_s": "exchange inside nodes",
    "exchange_across_s": "exchange across nodes",
    "tensor_s": "tensor parallelism",
    "zero_s": "ZeRO",
    "optimizer_s": "optimizer",
    "offload_s": "copies to the host",
    "sends_s": "sends between stages",
    "host_s": "launches",
    "bubble_s": "pipeline bubble",
}
_RECOMPUTED = {
    "none": "no checkpointing",
    "experts": "recompute-h",
    "full": "activation-checkpointing",
}
SAME = 0.005
"""Relative difference of step times below which they count as equal."""


def words_of(part: str) -> str:
    """Words for a part of `StepSeconds`."""
    return _WORDS[part]


def why_not(best: Candidate) -> list[str]:
    """A line for each neighbour of a layout: its change, and its time and memory compared."""
    lines = []
    for what, layout in _neighbours(best):
        other = Candidate(best.problem, layout)
        lines.append(f"{what}: {_verdict(best, other)}")
    return lines


def _verdict(best: Candidate, other: Candidate) -> str:
    problem = best.problem
    needs, has = other.memory.device_bytes / GIB, problem.cluster.device.memory_gib
    if needs > has:
        return f"needs {needs:.1f} GiB, the device has {has:.1f}"
    host, host_has = other.memory.host_bytes / GIB, problem.cluster.host.memory_gib
    if host > host_has:
        return f"needs {host:.1f} GiB of the host per device, which has {host_has:.1f}"
    ratio = other.seconds.total_s / best.seconds.total_s - 1
    saved = (best.memory.device_bytes - other.memory.device_bytes) / GIB
    memory = f"{abs(saved):.1f} GiB {'less' if saved > 0 else 'more'}"
    if abs(ratio) <= SAME:
        return f"as fast, {memory}"
    part = _grown(best.seconds, other.seconds) if ratio > 0 else _grown(other.seconds, best.seconds)
    faster = "slower" if ratio > 0 else "faster"
    return f"{100 * abs(ratio):.0f} % {faster} ({words_of(part)}), {memory}"


def _grown(before: StepSeconds, after: StepSeconds) -> str:
    """Name of the part of a step that grew most."""
    return max((f.name for f in fields(after)), key=lambda n: getattr(after, n) - getattr(before, n))


def _neighbours(best: Candidate) -> Iterator[tuple[str, RankLayout]]:
    """(change in words, layout) of layouts that differ by one choice."""
    layout, problem = best.layout, best.problem
    W = layout.stage_ranks // layout.dp_replicate_degree
    routes = routes_over(W)
    place = routes.index(layout.route_degree) if layout.route_degree in routes else -1
    has_experts = any(block.num_experts for block in problem.sizes.blocks)
    if has_experts and place > 0:
        route = routes[place - 1]
        yield f"route-degree {route}", replace(layout, route_degree=route)
    if has_experts and 0 <= place < len(routes) - 1:
        route = routes[place + 1]
        yield f"route-degree {route}", replace(layout, route_degree=route)
    if layout.route_degree > problem.cluster.node_size:
        other = "flat" if layout.all_to_all == "hierarchical" else "hierarchical"
        yield f"all-to-all {other}", replace(layout, all_to_all=other)  # type: ignore[arg-type]
    if layout.route_degree > 1:
        parts = 1 if layout.overlap_degree > 1 else 2
        yield f"overlap-degree {parts}", replace(layout, overlap_degree=parts)
    for checkpointing in checkpointings(problem.sizes):
        if checkpointing != layout.checkpointing:
            yield _RECOMPUTED[checkpointing], replace(layout, checkpointing=checkpointing)
    if layout.accumulation % 2 == 0:
        doubled = replace(layout, micro_batch=2 * layout.micro_batch, accumulation=layout.accumulation // 2)
        yield f"micro-batch of {doubled.micro_batch} sequences per rank", doubled
    if not layout.offload and layout.zero_stage > 1 and problem.host_bytes:
        yield "offload", replace(layout, offload=True)
    for zero in problem.zero_stages:
        if zero != layout.zero_stage and not (layout.offload and zero == 1):
            yield f"zero-stage {zero}", replace(layout, zero_stage=zero)
    tp = 2 * layout.tp_degree
    doubled = replace(layout, tp_degree=tp, micro_batch=2 * layout.micro_batch)
    if can_cut(problem, tp) and W % tp == 0 and layout.dp_degree % 2 == 0:
        yield f"tp-degree {tp}", doubled
