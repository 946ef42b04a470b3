"""Search over the layouts of a model on a cluster that this project can run, by memory and time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from typing import Literal

from expertmesh.config.cluster import Cluster, Precision
from expertmesh.costs.memory import GIB, PeakMemory, peak_memory
from expertmesh.costs.rank_layout import Checkpointing, Exchange, RankLayout, Workload
from expertmesh.costs.sizes import ModelSizes
from expertmesh.costs.state_bytes import OTHERS
from expertmesh.costs.step_time import Efficiency, StepSeconds, raw_step, step_seconds

Goal = Literal["throughput", "memory", "latency"]
SAFE = 0.92
"""Share of the device's memory up to which a plan is called safe: published peaks lie within 10 % of the model's in
most rows."""
OVERLAPS = (1, 2, 4)
TENSOR_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class ChosenDegrees:
    """Degrees of a layout that are given; None: searched."""

    tp_degree: int | None = None  # ranks that share sequences and dense matrices
    route_degree: int | None = None  # ranks that tokens travel over
    micro_batch: int | None = None  # sequences of a data-parallel rank in one pass
    zero_stage: int | None = None  # 1 to 3


@dataclass(frozen=True)
class Problem:
    """Inputs of a search."""

    sizes: ModelSizes
    cluster: Cluster
    work: Workload  # sequences, precision and software
    batch: int  # sequences of one step
    efficiency: Efficiency  # efficiency of the software
    pp_degree: int = 1  # pipeline stages; always 1 in runs of this project
    virtual_stages: int = 1  # virtual stages of each pipeline stage
    chosen: ChosenDegrees = ChosenDegrees()

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """ZeRO stages that the states have: software that shards optimizer states alone has the first."""
        if self.chosen.zero_stage is not None:
            return (self.chosen.zero_stage,)
        other = OTHERS.get(self.work.states)
        return (3, 2, 1) if other is None or other.shards_weights else (1,)

    @property
    def device_bytes(self) -> float:
        """Bytes of memory of one device."""
        return self.cluster.device.memory_gib * GIB

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory that one device may use."""
        return self.cluster.host.memory_gib * GIB


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and time."""

    problem: Problem
    layout: RankLayout

    @cached_property
    def memory(self) -> PeakMemory:
        """Peak memory of a rank."""
        return peak_memory(self.problem.sizes, self.layout, self.problem.work)

    @cached_property
    def seconds(self) -> StepSeconds:
        """Seconds of a step, by part."""
        p = self.problem
        return step_seconds(raw_step(p.sizes, self.layout, p.work, p.cluster), p.efficiency)

    @property
    def fits(self) -> bool:
        """Whether device and host have the memory."""
        memory, problem = self.memory, self.problem
        return memory.device_bytes <= problem.device_bytes and memory.host_bytes <= problem.host_bytes

    @property
    def filled(self) -> float:
        """Share of the memory that the fuller of device and host has in use."""
        memory, problem = self.memory, self.problem
        host = memory.host_bytes / problem.host_bytes if memory.host_bytes else 0.0
        return max(memory.device_bytes / problem.device_bytes, host)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.layout.tokens_per_step(self.problem.work.seq_len) / self.seconds.total_s

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: share of the devices' peak in BF16 (in FP32 for products in FP32)."""
        work, cluster = self.problem.work, self.problem.cluster
        flops = self.problem.sizes.training_flops(work.seq_len) * self.tokens_per_s
        precision: Precision = "float32" if work.precision == "float32" else "bfloat16"
        return flops / cluster.num_gpus / cluster.device.flops_per_s(precision)


def checkpointings(sizes: ModelSizes) -> tuple[Checkpointing, ...]:
    """Kinds of checkpointing that training has for a model; the hidden rows of experts need some."""
    has_experts = any(block.num_experts for block in sizes.blocks)
    return ("none", "experts", "full") if has_experts else ("none", "full")


def powers_of_two(most: int) -> list[int]:
    """The powers of two 1, 2, 4, ... up to `most`."""
    return [1 << n for n in range(max(most, 1).bit_length()) if 1 << n <= most]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def layouts(problem: Problem) -> Iterator[RankLayout]:
    """Layouts for each choice of degrees, ZeRO stage and checkpointing; micro-batch, offload and all-to-all stay
    open."""
    N = problem.cluster.num_gpus // problem.pp_degree
    has_experts = any(block.num_experts for block in problem.sizes.blocks)
    chosen = problem.chosen
    for tp in TENSOR_DEGREES if chosen.tp_degree is None else (chosen.tp_degree,):
        if N % tp or not can_cut(problem, tp):
            continue
        for copies in _copies(problem):
            W = N // copies
            if W % tp or not can_slice(problem.sizes, W):
                continue
            for route in routes_over(W, chosen.route_degree) if has_experts else [1]:
                for zero in problem.zero_stages:
                    for checkpointing in checkpointings(problem.sizes):
                        yield RankLayout(
                            num_ranks=problem.cluster.num_gpus,
                            tp_degree=tp,
                            pp_degree=problem.pp_degree,
                            virtual_stages=problem.virtual_stages,
                            route_degree=route,
                            dp_replicate_degree=copies,
                            zero_stage=zero,
                            checkpointing=checkpointing,
                        )


def can_cut(problem: Problem, tp_degree: int) -> bool:
    """Whether a tensor-parallel degree keeps within a node, divides all that it cuts, and leaves whole routing
    groups."""
    sizes, seq_len = problem.sizes, problem.work.seq_len
    divides = sizes.tensor_divisor % tp_degree == 0 and seq_len % tp_degree == 0
    keeps_groups = tp_degree == 1 or seq_len // tp_degree % sizes.routing_group == 0
    return tp_degree <= problem.cluster.node_size and divides and keeps_groups


def _copies(problem: Problem) -> Sequence[int]:
    """Numbers of copies of the model: one, and as many as put each copy on one, two or eight nodes; any if one is too
    wide."""
    N, node = problem.cluster.num_gpus // problem.pp_degree, problem.cluster.node_size
    if not can_slice(problem.sizes, N):
        return divisors(N)
    found = [N // (node * n) for n in (8, 2, 1) if N % (node * n) == 0]
    return sorted({1, *(c for c in found if c > 1)})


def can_slice(sizes: ModelSizes, num_ranks: int) -> bool:
    """Whether so many ranks can hold whole slices of the experts of each layer."""
    return not any(b.hidden_dim % RankLayout.slices(b.num_experts, num_ranks) for b in sizes.blocks)


def routes_over(num_ranks: int, chosen: int | None = None) -> list[int]:
    """Numbers of ranks that tokens may travel over: a chosen one that divides all ranks, else powers of two, and all of
    them."""
    if chosen is not None:
        return [] if num_ranks % chosen else [chosen]
    return [r for r in divisors(num_ranks) if r == num_ranks or r & (r - 1) == 0]


def with_batch(problem: Problem, layout: RankLayout) -> Iterator[RankLayout]:
    """Copies of the layout with each micro-batch that divides the step, largest first."""
    each, rest = divmod(problem.batch, layout.dp_degree)
    if rest or not each:
        return
    for size in reversed(divisors(each)):
        if problem.chosen.micro_batch in (None, size):
            yield replace(layout, micro_batch=size, accumulation=each // size)


def fitting(problem: Problem, *, smallest: bool = False) -> Iterator[Candidate]:
    """Candidates that fit: for each layout the largest micro-batch, with offload only if none fits without; all-to-all
    stays open.

    Where that fills more than `SAFE` of the memory, the largest that does not is a candidate, too.
    """
    for layout in layouts(problem):
        sized = list(with_batch(problem, layout))
        if smallest:
            sized = sized[-1:]
        for offload in (False, True) if layout.zero_stage > 1 and problem.host_bytes else (False,):
            each = (Candidate(problem, replace(s, offload=offload)) for s in sized)
            rest = (c for c in each if c.fits)
            if (found := next(rest, None)) is not None:
                yield found
                if found.filled > SAFE:
                    yield from islice((c for c in rest if c.filled <= SAFE), 1)
                break


def ways(candidate: Candidate) -> Iterator[Candidate]:
    """Copies of the candidate with each all-to-all and overlap degree."""
    layout, problem = candidate.layout, candidate.problem
    if layout.route_degree == 1:
        yield candidate
        return
    kinds: tuple[Exchange, ...] = ("flat",)
    if layout.route_degree > problem.cluster.node_size > 1:
        kinds = ("flat", "hierarchical")
    for kind in kinds:
        for parts in OVERLAPS:
            yield Candidate(problem, replace(layout, all_to_all=kind, overlap_degree=parts))


def search(problem: Problem, goal: Goal = "throughput") -> list[Candidate]:
    """Candidates that fit, best first, each with its fastest all-to-all and overlap degree.

    Args:
        goal: "throughput" and "latency": shortest step, with the largest micro-batch; "memory": least memory of the
            device.
    """
    found = [min(ways(one), key=lambda c: c.seconds.total_s) for one in fitting(problem, smallest=goal == "memory")]
    if goal == "memory":
        return sorted(found, key=lambda c: (_rounded(c.memory.device_bytes), c.seconds.total_s))
    return sorted(found, key=lambda c: (c.seconds.total_s, c.memory.device_bytes))


def _rounded(num_bytes: float) -> int:
    """Bytes rounded to eighths of a GiB, so that smaller differences decide nothing."""
    return round(8 * num_bytes / GIB)


def front(candidates: list[Candidate]) -> list[Candidate]:
    """Pareto front of candidates by memory and time, fastest first; a slower one must save 2 % of memory."""
    found: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.seconds.total_s, c.memory.device_bytes)):
        if not found or one.memory.device_bytes < 0.98 * found[-1].memory.device_bytes:
            found.append(one)
    return found
