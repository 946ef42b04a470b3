"""Rounds of streaming clients, some of which leave in the middle; `make soak` has long ones."""

import asyncio
import os
import random
import re
import resource
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from expertmesh.serve.load_client import Outcome, ask
from tests.support.serving import Served


@dataclass
class Round:
    """One round.

    Attributes:
        outcomes: of all requests.
        seconds: that it took.
        rss_bytes: of the server behind it.
        held: blocks, running and waiting answers when all clients were gone.
        client_s: CPU seconds of the clients.
        server_s: CPU seconds of the server.
        loop_waited_s: seconds in which the server's event loop could have run, and all cores had other work.
    """

    outcomes: list[Outcome]
    seconds: float
    rss_bytes: int
    held: float
    client_s: float
    server_s: float
    loop_waited_s: float

    @property
    def strays(self) -> list[Outcome]:
        """Requests that were neither answered whole, nor cut by the client, nor refused with 429."""
        return [o for o in self.outcomes if not (o.is_whole or o.is_cut or o.status == 429)]


def numbers(server: Served, *names: str) -> list[float]:
    """Numbers of /metrics, those of one name added up."""
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if re.match(rf"expertmesh:{name}\{{", line)) for name in names
    ]


def rss(server: Served) -> int:
    """Bytes of memory of the server."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text).group(1)) * 1024


def cpu_s(server: Served) -> float:
    """CPU seconds of the server so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loop_waited_s(server: Served) -> float:
    """Seconds that its first thread, which has the event loop, has waited for a core so far; 0 where the kernel does
    not count."""
    pid = server.process.pid
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


async def _clients(address: str, num: int, seconds: float, share: float, seed: int):
    end, outcomes = time.monotonic() + seconds, []

    async def client(number: int) -> None:
        draw = random.Random(1000 * seed + number)
        while time.monotonic() < end:
            body = {
                "prompt": [draw.randrange(1, 200) for _ in range(draw.randint(4, 40))],
                "max_tokens": draw.randint(4, 40),
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            leaves = draw.randint(1, 3) if draw.random() < share else None
            found = await ask(address, body, leave_after=leaves)
            outcomes.append(found)
            if found.status == 429:
                await asyncio.sleep(0.5)

    await asyncio.gather(*(client(number) for number in range(num)))
    return outcomes


def soak(server: Served, *, clients: int, seconds: float, share: float = 0.3, seed: int = 0) -> Round:
    """One round.

    Args:
        server: under load.
        clients: that ask one request after the other.
        seconds: in which new requests are begun.
        share: of the requests that are cut by the client.
        seed: of the requests.
    """
    cpu, waited = cpu_s(server), loop_waited_s(server)
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    outcomes = asyncio.run(_clients(server.address, clients, seconds, share, seed))
    took, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu, waited = cpu_s(server) - cpu, loop_waited_s(server) - waited
    client_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (steps,) = numbers(server, "iteration_duration_seconds_count")
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    while (held := sum(numbers(server, *names))) and (
        numbers(server, "iteration_duration_seconds_count")[0] <= steps + 2
    ):
        time.sleep(0.005)  # two steps later nothing may be held
    return Round(outcomes, took, rss(server), held, client_s, cpu, waited)


def lag_ms(server: Served, share: float = 0.99) -> float:
    """By how much the event loop was late, at most, for this share of the time; from the buckets of its histogram."""
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    pattern = r'event_loop_lag_seconds_bucket\{le="([^"]+)"[^}]*\} (\S+)'
    buckets = [(float(le), float(n)) for le, n in re.findall(pattern, text)]
    return 1000 * next(le for le, n in buckets if n >= share * buckets[-1][1])
