"""Weak scaling of a model from 8 to 4,096 devices, tokens per device constant, and the sizes at which its best layout
changes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from expertmesh.config.cluster import Cluster
from expertmesh.planner.search import Candidate, Problem, search

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Scaled:
    """The best layout on one number of devices."""

    num_gpus: int  # number of devices
    best: Candidate | None  # the best layout; None: none fits

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one device; 0 where nothing fits."""
        return 0.0 if self.best is None else self.best.tokens_per_s / self.num_gpus


@dataclass(frozen=True)
class Crossover:
    """A change of the best layout with the number of devices."""

    what: str  # the change, in words
    num_gpus: int | None  # devices of the smallest cluster after the change; None: nowhere from 8 to 4,096


def scaling(problem: Problem) -> list[Scaled]:
    """The best layout for throughput on each number of devices, a step's tokens growing with them."""
    each = max(problem.batch // problem.cluster.num_gpus, 1)
    found = []
    for number in SIZES:
        cluster = _resized(problem.cluster, number)
        here = replace(problem, cluster=cluster, batch=each * number)
        candidates = search(here)
        found.append(Scaled(number, candidates[0] if candidates else None))
    return found


def _resized(cluster: Cluster, number: int) -> Cluster:
    per_node = cluster.ranks_per_node
    if number > per_node and number % per_node:
        per_node = max(n for n in SIZES if n <= per_node)
    return cluster.model_copy(update={"num_gpus": number, "ranks_per_node": per_node})


def crossovers(found: list[Scaled]) -> list[Crossover]:
    """Sizes at which tokens leave the node, hierarchical all-to-all wins, and ZeRO-3's gathers take time."""
    tests: dict[str, Callable[[Candidate], bool]] = {
        "tokens leave the node": _leaves,
        "hierarchical exchange is faster than flat": lambda c: _leaves(c) and c.layout.all_to_all == "hierarchical",
        "gathers of ZeRO-3 would take a tenth of a step or more": _gathers,
    }
    return [
        Crossover(what, next((s.num_gpus for s in found if s.best is not None and test(s.best)), None))
        for what, test in tests.items()
    ]


def _leaves(candidate: Candidate) -> bool:
    return candidate.layout.route_degree > candidate.problem.cluster.node_size


def _gathers(candidate: Candidate) -> bool:
    """Whether the layout, with ZeRO-3 over all ranks, would wait for gathers more than a tenth of a step."""
    layout = replace(candidate.layout, zero_stage=3, dp_replicate_degree=1)
    seconds = Candidate(candidate.problem, layout).seconds
    return seconds.zero_s > 0.1 * seconds.total_s
