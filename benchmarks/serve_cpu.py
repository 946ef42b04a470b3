"""Share of the server's CPU time that is not the engine's steps, with streaming clients: HTTP, JSON, event loop,
delivery.

    python -m benchmarks.serve_cpu /tmp/peers/models/m-bf16 --concurrency 64

The server is a process whose engine adds up the CPU time of its steps, on one thread; all else that the process takes,
every thread of it, is outside. CPU time, because other work on a machine counts little in it. A first round warms up.
"""

import argparse
import asyncio
import functools
import multiprocessing
import statistics
import time
from pathlib import Path

import httpx2
from tests.support.serving import served
from tests.support.soak import cpu_s

from expertmesh.config.load import LoadConfig
from expertmesh.engine.engine import Engine
from expertmesh.serve.load_client import bodies, drive


def count_steps(seconds) -> None:
    """Adds the CPU seconds of every step of this process's engines to a shared number."""
    step = Engine.step

    def counted(engine):
        begin = time.thread_time()
        try:
            return step(engine)
        finally:
            seconds.value += time.thread_time() - begin

    Engine.step = counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = LoadConfig(num_requests=options.num_requests, concurrency=options.concurrency)
    seconds = multiprocessing.get_context("forkserver").Value("d", lock=False)
    shares = []
    with served(options.folder, prepare=functools.partial(count_steps, seconds)) as server:
        facts = httpx2.get(f"{server.address}/tokenizer_info", timeout=60).json()
        room = {"vocab_size": facts["vocab_size"], "max_len": facts["model_max_length"]}
        for number in range(options.rounds + 1):
            requests = list(bodies(load.updated({"seed": number}), **room))
            before, steps = cpu_s(server), seconds.value
            outcomes, wall = asyncio.run(drive(server.address, load, requests))
            whole, steps = cpu_s(server) - before, seconds.value - steps
            assert all(one.is_whole for one in outcomes), "all must be answered"
            tokens = sum(one.num_tokens for one in outcomes)
            share = 1 - steps / whole
            print(
                f"round {number}{' (warms up)' if number == 0 else ''}: {tokens} tokens in {wall:.1f} s; CPU "
                f"{whole:.2f} s, steps "
                f"{steps:.2f} s, outside {100 * share:.1f} %, {1e6 * (whole - steps) / tokens:.0f} us per token",
                flush=True,
            )
            if number:
                shares.append(share)
    print(f"median of {len(shares)} rounds: {100 * statistics.median(shares):.1f} % outside")


if __name__ == "__main__":
    main()
