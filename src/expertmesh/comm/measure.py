"""Bandwidth between ranks over message sizes, and links of the cost model fitted to it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from expertmesh.comm.all_to_all.flat import async_all_to_all
from expertmesh.comm.collectives import all_gather, start_all_reduce
from expertmesh.comm.group import RankGroup, wait
from expertmesh.comm.world import World
from expertmesh.costs.communication import USUAL_NETWORK, Link, Network

REPEATS = 5


@dataclass(frozen=True)
class LinkMeasurement:
    """Time and bandwidth of one algorithm on one class of links at one message size."""

    algorithm: str  # all_to_all, all_gather, all_reduce, or two_step: an all-to-all across nodes, then one inside
    link: str  # class of the links: "inside" a node, "across" nodes, or "all"
    num_bytes: int  # bytes that a rank sends to each other rank (all_reduce: bytes of the tensor)
    seconds: float  # median time of the slowest rank
    # bytes that a rank sends to others per second, comparable between algorithms and numbers of ranks
    bus_bytes_per_s: float


def link_groups(world: World, nodes: Sequence[int]) -> dict[str, RankGroup]:
    """Make this rank's group in each class of links; every rank must call. Ranks of equal index in their nodes form
    "across" groups."""
    members: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        members.setdefault(node, []).append(position)
    found = {"all": world.all_ranks()}
    if len(members) == 1 or len(members) == world.size:
        return found | {"inside" if len(members) == 1 else "across": world.all_ranks()}
    by_place: dict[int, list[int]] = {}
    for positions in members.values():
        for place, position in enumerate(positions):
            by_place.setdefault(place, []).append(position)
    found["inside"] = world.group(list(members.values()), name="the ranks of a node")
    found["across"] = world.group(list(by_place.values()), name="one rank of each node")
    return found


def measure(world: World, nodes: Sequence[int], sizes: Sequence[int]) -> Iterator[LinkMeasurement]:
    """Measure all algorithms on all classes of links; every rank must exhaust the iterator."""
    groups = link_groups(world, nodes)
    # with nodes of different sizes some ranks would have no partner in another node
    has_two_steps = {"inside", "across"} <= groups.keys() and len(set(map(nodes.count, nodes))) == 1
    for size in sizes:
        for link, group in groups.items():
            n = group.size
            x_PB = torch.zeros(n, max(size // 4, 1), device=world.device_type)
            flat = x_PB[0].clone()
            ways: dict[str, tuple[Callable[[], object], int]] = {
                "all_to_all": (partial(_all_to_all, x_PB, group), (n - 1) * size),
                "all_gather": (partial(all_gather, flat, group, where="bench"), (n - 1) * size),
                "all_reduce": (partial(_all_reduce, flat, group), 2 * (n - 1) * size // n),
            }
            if link == "all" and has_two_steps:
                ways["two_step"] = (partial(_two_step, x_PB, groups), (n - 1) * size)
            for algorithm, (run, num_bytes) in ways.items():
                seconds = _slowest(world, _timed(world, run))
                yield LinkMeasurement(algorithm, link, size, seconds, num_bytes / seconds)


def _all_reduce(x: Tensor, group: RankGroup) -> None:
    wait(start_all_reduce(x, group, where="bench"))


def _all_to_all(x_PB: Tensor, group: RankGroup) -> Tensor:
    return async_all_to_all(x_PB, None, group, where="bench").finish()


def _two_step(x_PB: Tensor, groups: dict[str, RankGroup]) -> None:
    """All-to-all across nodes, then inside nodes: as many bytes per rank as the flat one, in fewer messages. Nodes must
    be equal in size."""
    across, inside = groups["across"], groups["inside"]
    x_PB = _all_to_all(x_PB.view(across.size, -1), across)
    _all_to_all(x_PB.view(inside.size, -1), inside)


def _timed(world: World, run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        _synchronize(world)
        start = time.perf_counter()
        run()
        _synchronize(world)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _synchronize(world: World) -> None:
    if world.device_type == "cuda":
        torch.cuda.synchronize()


def _slowest(world: World, seconds: float) -> float:
    mine = torch.tensor(seconds, dtype=torch.float64, device=world.device_type)
    return float(all_gather(mine, world.all_ranks(), where="bench").max())


def fit(points: Sequence[LinkMeasurement], nodes: Sequence[int]) -> Network:
    """Fit links to the all-to-all measurements: latency by the smallest, bandwidth by the largest. Links without a
    measurement are `USUAL_NETWORK`'s."""
    sizes = [nodes.count(node) for node in dict.fromkeys(nodes)]
    peers = {"inside": max(sizes) - 1, "across": len(sizes) - 1}
    sharing = {"inside": 1, "across": max(sizes)}
    links = {}
    for name in ("inside", "across"):
        mine = [p for p in points if p.algorithm == "all_to_all" and p.link == name]
        if not mine or not peers[name]:
            links[name] = getattr(USUAL_NETWORK, name)
            continue
        small, large = (f(mine, key=lambda p: p.num_bytes) for f in (min, max))
        latency = small.seconds / peers[name]
        moving = max(large.seconds - small.seconds, large.seconds / 10)
        links[name] = Link(latency, sharing[name] * peers[name] * large.num_bytes / moving)
    return Network(links["inside"], links["across"])
