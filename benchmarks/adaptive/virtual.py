"""Overlap with and without the split backward, in CPU seconds and a link that is only reckoned: any machine will do.

torchrun --nproc-per-node 2 -m benchmarks.adaptive.virtual [--tokens 2048] [--hidden 512] [--rounds 5]

A rank's clock is CPU time of its thread, and what it waits for its link: a link sends one exchange after the other, at
a rate that makes all exchanges of a step take as long as its products. Nothing else on the machine counts.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.adaptive.rank import build, choices, in_sequence, step

from expertmesh import Routing
from expertmesh.comm.group import Pending, RankGroup
from expertmesh.comm.world import World
from expertmesh.parallel.experts.gather import GatheredWeights


class Link:
    """What this rank sends, one exchange after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.waited_s, self.free_at, self.sent = bytes_per_s, 0.0, 0.0, 0

    def now(self) -> float:
        return time.thread_time() + self.waited_s

    @contextmanager
    def under(self) -> Iterator[None]:
        """Exchanges take the link's time while this lasts."""
        start, wait, done = RankGroup.start, Pending.wait, dict[int, float]()

        def begin(group: RankGroup, collective: str, where: str, num_bytes: int, *rest: Any, **named: Any) -> Any:
            pending = start(group, collective, where, num_bytes, *rest, **named)
            if collective == "all_to_all" and pending is not None:
                self.sent += num_bytes
                self.free_at = max(self.free_at, self.now()) + num_bytes / self.bytes_per_s
                done[id(pending)] = self.free_at
            return pending

        def end(pending: Pending) -> None:
            wait(pending)
            self.waited_s += max(0.0, done.pop(id(pending), 0.0) - self.now())

        with (
            mock.patch.object(RankGroup, "start", begin),
            mock.patch.object(Pending, "wait", end),
        ):
            yield


def seconds_of(link: Link, run: Callable[[], object]) -> float:
    began = link.now()
    with link.under():
        run()
    return link.now() - began


def whole_backward(run: Callable[[], object]) -> None:
    """Run with weight gradients computed where the tokens' are."""
    with mock.patch.object(GatheredWeights, "late", lambda _, parameters: parameters):
        run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 2048), ("dim", 512), ("hidden", 512), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    world, job = World(), {**vars(options), "experts": 8, "top_k": 2}
    layer, x = build(job, world), torch.randn(options.tokens, options.dim)
    routing = Routing(choices(job, world.position))
    one = partial(step, layer, x, routing, {})
    fast = Link(1e15)
    products = median([seconds_of(fast, one) for _ in range(options.rounds + 1)][1:])
    link = Link(fast.sent / (options.rounds + 1) / products)
    ways: dict[str, Callable[[], object]] = {"nothing hidden": partial(in_sequence, one)}
    for n in (1, 2, 4, 8):
        parts = partial(step, layer, x, routing, {"overlap_degree": n})
        ways |= {f"n{n}, split": parts, f"n{n}, whole": partial(whole_backward, parts)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, run in ways.items():
            dist.barrier()
            seconds = seconds_of(link, run)
            if number:
                found[name].append(seconds)
    if world.position == 0:
        whole = median(found["nothing hidden"])
        print(f"products {products:.3f} s, {link.bytes_per_s:.3g} bytes/s; of {whole:.3f} s with nothing hidden:")
        for name, times in found.items():
            spread = f"{min(times) / whole:.2f} to {max(times) / whole:.2f}"
            print(f"  {name:14} {median(times) / whole:.3f}  ({spread})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
