"""Hosts that are network namespaces on one bridge, and ranks on them; needs root and iproute2."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SUBNET = "10.213.78"
PORT = "29533"
BUCKET_BYTES = 1 << 16


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@contextmanager
def hosts(number: int, rate: str | None) -> Iterator[list[str]]:
    """Names of namespaces with an interface net0 each, which sends at a rate in tc's words; None: as fast as it can."""
    mark = os.getpid()
    switch, names = f"em-switch-{mark}", [f"em-host-{mark}-{n}" for n in range(number)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for n, name in enumerate(names):
            ip("netns", "add", name)
            peer = ("peer", "name", f"port{n}", "netns", switch)
            ip("link", "add", "net0", "netns", name, "type", "veth", *peer)
            ip("-n", switch, "link", "set", f"port{n}", "master", "br0", "up")
            ip("-n", name, "address", "add", f"{SUBNET}.{n + 1}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            # a packet of more than the bucket holds is cut by the processor that the ranks compute on, not by a card
            ip("-n", name, "link", "set", "dev", "net0", "gso_max_size", str(BUCKET_BYTES // 2))
            ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                words = ["qdisc", "add", "dev", "net0", "root", "tbf", "rate", rate]
                words += ["burst", str(BUCKET_BYTES), "latency", "200ms"]
                subprocess.run(["tc", "-n", name, *words], check=True)
        yield names
    finally:
        for name in [*names, switch]:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def run_ranks(names: list[str], per_host: int, job: dict[str, Any], *, limit_s: float = 500) -> Any:
    """Run `benchmarks.adaptive.rank` with a job on every rank; what rank 0 printed last, as JSON."""
    world, started = len(names) * per_host, []
    for rank in range(world):
        host, local = divmod(rank, per_host)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "net0",
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        words = [
            "ip",
            "netns",
            "exec",
            names[host],
            sys.executable,
            "-m",
            "benchmarks.adaptive.rank",
        ]
        started.append(
            subprocess.Popen(
                [*words, json.dumps(job)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        )
    deadline = time.monotonic() + limit_s
    try:
        output, _ = started[0].communicate(timeout=limit_s)
        for process in started[1:]:
            process.wait(timeout=max(deadline - time.monotonic(), 1))
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"a rank failed: {[process.returncode for process in started]}")
    return json.loads(output.strip().splitlines()[-1])


def crossed_bytes(names: list[str]) -> list[int]:
    """Bytes that each host has received so far."""
    return [
        json.loads(ip("-n", name, "-s", "-j", "link", "show", "net0"))[0]["stats64"]["rx"]["bytes"] for name in names
    ]
