"""What one rank does: variants of a layer, or of its exchange alone, timed in turn; rank 0 prints medians as JSON."""

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.adaptive.models import steps
from torch import Tensor

from expertmesh import MoELayer, Routing
from expertmesh.comm.group import RankGroup, wait
from expertmesh.comm.world import World
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import Link, Network
from expertmesh.moe.dispatch import Dispatched
from expertmesh.parallel.experts.adaptive import adapt
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.training.heap import keep_freed_memory

SLOW = 1.3
"""Static plans that took so many times the best one's time are not among the finalists."""
HOPELESS = 8.0
"""Nor are those timed again that did in the first round, in which groups connect."""
FINAL_S = 6.0
"""Of each finalist's rounds; but no more than 25 rounds, and no fewer than a job's."""
Timed = tuple[float, float, int]
"""Seconds, processor seconds, and bytes that all ranks hand to others."""


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(world: World, run: Callable[[], object]) -> Timed:
    """Of the slowest rank, from a barrier on."""
    dist.barrier()
    with world.traffic.logged() as log:
        start, cpu = time.perf_counter(), cpu_seconds()
        run()
        dist.barrier()
        spent = torch.tensor([time.perf_counter() - start, cpu_seconds() - cpu])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    handed = torch.tensor(log.num_bytes(collective="all_to_all"))
    dist.all_reduce(handed)
    return float(spent[0]), float(spent[1]), int(handed)


def in_turn(
    world: World,
    variants: dict[str, Callable[[], object]],
    rounds: int,
    hopeless: float | None = None,
) -> dict[str, dict[str, float]]:
    """Medians after one round that does not count, but for variants that take `hopeless` times the best one's time in
    it.

    Each round has an order of its own: what ran before leaves memory and connections behind.
    """
    found: dict[str, list[Timed]] = {name: [timed(world, run)] for name, run in variants.items()}
    limit = None if hopeless is None else hopeless * min(t[0][0] for t in found.values())
    left = [name for name in variants if limit is None or found[name][0][0] <= limit]
    for each in range(rounds):
        for name in random.Random(each).sample(left, len(left)):
            found[name].append(timed(world, variants[name]))
    return {
        name: {
            "seconds": median(t[0] for t in times[1:] or times),
            "cpu_seconds": median(t[1] for t in times[1:] or times),
            "bytes": times[-1][2],
            "is_first_round": len(times) == 1,
        }
        for name, times in found.items()
    }


def choices(job: dict[str, Any], rank: int) -> Tensor:
    """(T, K) different experts; with "fullest" above 1 expert 0 has so many times the mean."""
    T, K, E = job["tokens"], job["top_k"], job["experts"]
    generator = torch.Generator().manual_seed(rank)
    weights = torch.ones(E)
    full = job.get("fullest", 1.0)
    if full > 1:
        part = min(full / E, 0.95)
        weights = torch.full((E,), (1 - part) / (E - 1))
        weights[0] = part
    if K == 1:
        return torch.multinomial(weights, T, True, generator=generator)[:, None]
    return torch.multinomial(weights.expand(T, -1), K, generator=generator)


def build(job: dict[str, Any], world: World, **spread: Any) -> MoELayer:
    layer = MoELayer(
        dim=job["dim"], hidden_dim=job["hidden"], num_experts=job["experts"], top_k=job["top_k"],
        aux_loss_weight=0.0, seed=0,
    )  # fmt: skip
    spread_experts(layer, world, **spread)
    return layer


def network_of(job: dict[str, Any]) -> Network:
    across = Link(3e-4, job.get("bytes_per_s") or 1e9)
    return Network(Link(1e-4, 5e8), across)


def exchange(job: dict[str, Any], world: World) -> Any:
    """Dispatch and combine, forward only, without experts: flat, hierarchical, auto, and one copy per choice."""
    layer = build(job | {"hidden": 8}, world, network=network_of(job))
    dispatcher: Any = layer.dispatcher
    ids_TK, T, K = choices(job, world.position), job["tokens"], job["top_k"]
    x_TD, weights_TK = torch.randn(T, job["dim"]), torch.rand(T, K)

    def go(is_flat: bool, tokens: Dispatched) -> None:
        chunks = dispatcher.num_chunks(tokens.expert_ids_TK.shape[1], x_TD, 1)
        (dispatch_handle,) = dispatcher.exchange(is_flat=is_flat).start_parts(tokens, 1, chunks)
        dispatch_handle.start_home(dispatch_handle.finish().x_TD).finish()

    tokens = Dispatched(x_TD, ids_TK, weights_TK)
    single = Dispatched(x_TD.repeat(K, 1), ids_TK.t().reshape(-1, 1), weights_TK.t().reshape(-1, 1))
    with torch.no_grad():
        dispatcher.load.begin(is_again=False)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=job["experts"])
        dispatcher.sum_over_processes(counts_E)
        auto = dispatcher._faster(world.size, tokens)
        variants = {
            "flat": partial(go, True, tokens),
            "hierarchical": partial(go, False, tokens),
        }
        if job.get("copies", True):
            variants["one copy per choice"] = partial(go, True, single)
        return {"auto": auto, "times": in_turn(world, variants, job["rounds"])}


def step(layer: MoELayer, x: Tensor, routing: Routing, way: dict[str, Any]) -> None:
    """Forward and backward; way: arguments of the layer's call."""
    x = x.detach().requires_grad_()
    y, _ = layer(x, routing=routing, **way)
    y.backward(torch.ones_like(y))
    for parameter in layer.parameters():
        parameter.grad = None


def in_sequence(run: Callable[[], object]) -> None:
    """Run with every exchange waited for where it starts; degree 1 fills the last one of the backward with products
    otherwise."""
    start = RankGroup.start

    def start_and_wait(*args: Any, **named: Any) -> None:
        wait(start(*args, **named))

    with mock.patch.object(RankGroup, "start", start_and_wait):
        run()


def layer_steps(job: dict[str, Any], world: World) -> Any:
    """Forward and backward of one layer for several ways, and for the one that the tuner settles on."""
    layer = build(job, world, network=network_of(job))
    routing = Routing(choices(job, world.position))
    x = torch.randn(job["tokens"], job["dim"])
    ways: dict[str, dict[str, Any]] = job["ways"]
    call = {"capacity_factor": job.get("capacity_factor")}
    variants = {name: partial(step, layer, x, routing, call | way) for name, way in ways.items()}
    if job.get("in_sequence"):
        variants["nothing hidden"] = partial(in_sequence, partial(step, layer, x, routing, call))
    rounds, hopeless = (1, HOPELESS) if job.get("adaptive") else (job["rounds"], None)
    found: dict[str, Any] = {"times": in_turn(world, variants, rounds, hopeless)}
    if job.get("adaptive"):
        times = {name: t["seconds"] for name, t in found["times"].items()}
        finals = {n: variants[n] for n, s in times.items() if s <= SLOW * min(times.values())}
        adapt([layer], DispatchOptions(), network_of(job), num_gathers=1)
        dispatcher: Any = layer.dispatcher
        for _ in range(150):
            step(layer, x, routing, call)
            if dispatcher.chooser.tuner.settled:
                break
        found["settled"] = {k: vars(w) for k, w in dispatcher.chooser.tuner.settled.items()}
        finals["adaptive"] = partial(step, layer, x, routing, call)
        rounds = max(job["rounds"], min(25, round(FINAL_S / min(times.values()))))
        found["finals"] = in_turn(world, finals, rounds)
    found["peak_kib"] = {"peak": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}
    return found


def alone(job: dict[str, Any], world: World) -> Any:
    """Seconds of the exchange of a step alone (four ways), and processor seconds of the products of a rank alone."""
    layer = build(job | {"hidden": 8}, world)
    local = MoELayer(
        dim=job["dim"], hidden_dim=job["hidden"], num_experts=job["experts"], top_k=job["top_k"],
        aux_loss_weight=0.0, seed=0,
    )  # fmt: skip
    routing, x = Routing(choices(job, world.position)), torch.randn(job["tokens"], job["dim"])
    return in_turn(
        world,
        {
            "exchange": partial(step, layer, x, routing, {}),
            "products": partial(step, local, x, routing, {}),
        },
        job["rounds"],
    )


def models(job: dict[str, Any], world: World) -> Any:
    """Whole training steps of a GPT, ours and with DeepSpeed's layers, whose bytes nobody counts."""
    runs, chosen = steps(job, world)
    runs["nothing hidden"] = partial(in_sequence, runs["defaults"])
    times = in_turn(world, runs, job["rounds"])
    for name, found in times.items():
        if name.startswith("DeepSpeed"):
            del found["bytes"]
    return {"times": times, "settled": chosen()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    world = World()
    kinds = {"exchange": exchange, "layer": layer_steps, "alone": alone, "models": models}
    found = kinds[job["kind"]](job, world)
    if world.position == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
