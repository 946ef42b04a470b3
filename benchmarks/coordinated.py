"""Coordinated all-to-all beside each to all: two hosts of two ranks, a cable of 200 Mbit/s, L = 2. Needs root and
iproute2.

    python -m benchmarks.coordinated [--tokens 1024] [--dim 512] [--rounds 7]

Both compute the same layer (the program stops where they differ) by turns; times are medians of the slowest rank's
rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.adaptive.hosts import PORT, SUBNET, hosts

from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.coordinated import ServingGroups, StepSizes
from expertmesh.parallel.serving import as_plain, serving_degrees, serving_groups, spread_layers

RANKS, TP, EXPERTS = 4, 2, 8


def _layer(job: dict[str, Any], world: World, tp: int, kind: dict[str, Any]) -> MoELayer:
    """One layer of the same weights on all ranks, spread."""
    layer = MoELayer(dim=job["dim"], hidden_dim=64, num_experts=EXPERTS, top_k=2, seed=0).eval()
    config = ParallelConfig(tp_degree=tp, **kind)
    degrees = serving_degrees(config, num_ranks=RANKS, num_experts=(EXPERTS,), hidden_dim=64)
    groups: ServingGroups = serving_groups(world, degrees)
    spread_layers(layer, world, degrees, groups, StepSizes(job["tokens"]), {})
    as_plain(layer)
    return layer


def rank(job: dict[str, Any]) -> None:
    """One rank: times of both ways, printed by the first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    world = World()
    generator = torch.Generator().manual_seed(world.position // TP)
    x_TD = torch.randn(job["tokens"], job["dim"], generator=generator)
    ways = {
        "each to all": _layer(job, world, 1, {}),
        "coordinated": _layer(job, world, TP, {}),
        "coordinated, experts in every column": _layer(job, world, TP, {"ep_degree": (2,), "es_degree": 1}),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, tuple[int, int]] = {}
    with torch.no_grad():
        expected, _ = ways["each to all"](x_TD)
        for name, layer in ways.items():
            with world.traffic.logged() as log:
                found, _ = layer(x_TD)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            sent[name] = len(log.transfers), log.num_bytes()
        for _ in range(job["rounds"]):
            for name, layer in ways.items():
                dist.barrier()
                begin = time.perf_counter()
                layer(x_TD)
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(took.item())
    if world.position == 0:
        print(json.dumps({"times": times, "sent": sent}))
    dist.destroy_process_group()


def main() -> None:
    """Run the ranks on two hosts and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(json.loads(options.rank))
        return
    job = {"tokens": options.tokens, "dim": options.dim, "rounds": options.rounds}
    with hosts(2, options.rate) as names:
        started = []
        for number in range(RANKS):
            environment = {
                **os.environ,
                "RANK": str(number),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": f"{SUBNET}.1",
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "net0",
                "OMP_NUM_THREADS": "1",
                "RES_OPTIONS": "timeout:1 attempts:1",
            }
            inside = ["ip", "netns", "exec", names[number // TP], sys.executable]
            words = [*inside, "-m", "benchmarks.coordinated", "--rank", json.dumps(job)]
            output = subprocess.PIPE if number == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen(words, stdout=output, text=True, env=environment))
        output_text, _ = started[0].communicate(timeout=500)
        codes = [process.wait(timeout=60) for process in started]
    if any(codes):
        raise SystemExit(f"a rank failed: {codes}")
    found = json.loads(output_text.strip().splitlines()[-1])
    base = statistics.median(found["times"]["each to all"])
    print(f"{options.tokens} tokens of {options.dim} FP32 per group, {options.rate}")
    for name, seconds in found["times"].items():
        median = statistics.median(seconds)
        ratios = [a / b for a, b in zip(found["times"]["each to all"], seconds, strict=True)]
        print(
            f"{name}: {median * 1e3:.0f} ms ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f}), "
            f"{base / median:.2f} times as fast (rounds {min(ratios):.2f} to {max(ratios):.2f}), "
            f"{found['sent'][name][1]:,} bytes sent by a rank"
        )


if __name__ == "__main__":
    main()
