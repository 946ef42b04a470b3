"""Throughput through the server beside the engine's own, on one model, in one run.

    python -m benchmarks.serve /tmp/peers/models/m-bf16

The same requests go to an engine in this process and to a server process, in turns. The clients run in this process;
the CPU time that they take is subtracted from the server's seconds, as it is not the server's. On a machine that others
use, too, only the ratio of CPU times means something: all that the server's process takes, its event loop included,
beside what the engine's takes.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from tests.support.serving import served
from tests.support.soak import cpu_s

from expertmesh.config.load import LoadConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.serve.load_client import bodies, drive, table


def alone(engine: Engine, requests: list[dict]) -> tuple[int, float]:
    """Tokens and seconds of an engine without a server."""
    params = [SamplingParams(max_tokens=one["max_tokens"], ignore_eos=True, seed=one["seed"]) for one in requests]
    begin = time.perf_counter()
    outputs = engine.generate([one["prompt"] for one in requests], params)
    return sum(len(one.token_ids) for one in outputs), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = LoadConfig(num_requests=options.num_requests, concurrency=options.concurrency)
    engine = Engine(options.folder)
    facts = {"vocab_size": engine.model.vocab_size, "max_len": engine.max_len}
    ratios, cpu_ratios = [], []
    with served(options.folder, is_forked=False) as server:
        for number in range(options.rounds + 1):
            requests = list(bodies(load.updated({"seed": number}), **facts))
            own_cpu = time.process_time()
            tokens, seconds = alone(engine, requests)
            own_cpu = time.process_time() - own_cpu
            cpu, server_cpu = time.process_time(), cpu_s(server)
            outcomes, wall = asyncio.run(drive(server.address, load, requests))
            cpu = time.process_time() - cpu
            server_cpu = cpu_s(server) - server_cpu
            served_tokens = sum(one.num_tokens for one in outcomes)
            assert served_tokens == tokens, "both must answer all"
            if number == 0:
                continue  # warms up both
            own, through = tokens / seconds, tokens / (wall - cpu)
            ratios.append(through / own)
            cpu_ratios.append(own_cpu / server_cpu)
            print(
                f"round {number}: engine {own:.1f} tokens/s, through the server {through:.1f} (clients' {cpu:.1f} s of "
                f"{wall:.1f} s subtracted; with them {tokens / wall:.1f}), ratio {ratios[-1]:.3f}; "
                f"CPU {own_cpu:.2f} s alone, {server_cpu:.2f} s served, ratio {cpu_ratios[-1]:.3f}",
                flush=True,
            )
            print(table(outcomes, wall), flush=True)
    medians = [statistics.median(found) for found in (ratios, cpu_ratios)]
    print(f"medians of {len(ratios)} rounds: by the clock {medians[0]:.3f}, by CPU time {medians[1]:.3f}")


if __name__ == "__main__":
    main()
