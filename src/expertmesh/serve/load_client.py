"""Load-test client with plain sockets, so that it takes little CPU time from a server on the same machine."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from expertmesh.config.load import LoadConfig
from expertmesh.errors import ConfigError

_LINE_BYTES = 2**24
SHARES = (0.5, 0.9, 0.99)


@dataclass
class Outcome:
    """Result of a request."""

    status: int = 0  # HTTP status; 0: no response
    seconds: float = 0.0  # time until the end
    arrivals: list[float] = field(default_factory=list)  # times in seconds at which chunks arrived
    num_tokens: int = 0  # tokens of the answer, as counted by the server
    is_whole: bool = False  # whether the answer was complete
    is_cut: bool = False  # whether this client disconnected on purpose
    error: str = ""  # error message, or ""


def bodies(load: LoadConfig, *, vocab_size: int, max_len: int) -> Iterator[dict[str, Any]]:
    """Bodies of the requests."""
    draw = random.Random(load.seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    prefixes = [tokens(load.prefix_tokens) for _ in range(load.num_prefixes)]
    longest = load.prefix_tokens + load.prompt_tokens[1] + load.answer_tokens[1]
    if longest > max_len:
        raise ConfigError(
            "prompt_tokens",
            load.prompt_tokens,
            f"makes requests of up to {longest} tokens with prefix and answer, and the model has room for {max_len}",
            "ask for shorter ones",
        )
    for number in range(load.num_requests):
        yield {
            "prompt": draw.choice(prefixes) + tokens(draw.randint(*load.prompt_tokens)),
            "max_tokens": draw.randint(*load.answer_tokens),
            "ignore_eos": True,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def ask(address: str, body: dict[str, Any], *, key: str | None = None, leave_after: int | None = None) -> Outcome:
    """Send a streaming request and read its answer.

    Args:
        address: http://HOST:PORT.
        body: body of /v1/completions.
        leave_after: number of chunks after which to disconnect; None: read to the end.
    """
    place = urlsplit(address)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\nconnection: "
        "close\r\n"
    )
    if key is not None:
        head += f"authorization: Bearer {key}\r\n"
    found, begin = Outcome(), time.perf_counter()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80, limit=_LINE_BYTES)
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        found.status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                found.is_whole = not found.error
            elif b'"choices":[]' in line:
                found.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            elif line.startswith(b'data: {"error"'):
                found.error = line.decode()
            else:
                found.arrivals.append(time.perf_counter() - begin)
            if leave_after is not None and len(found.arrivals) >= leave_after:
                found.is_cut = True
                break
    except (OSError, IndexError, ValueError) as error:
        found.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    found.seconds = time.perf_counter() - begin
    return found


async def drive(
    address: str, load: LoadConfig, requests: Sequence[dict[str, Any]], *, key: str | None = None
) -> tuple[list[Outcome], float]:
    """Send requests at their scheduled times. Returns outcome of each request, and the total seconds."""
    places = asyncio.Semaphore(load.concurrency)
    draw = random.Random(load.seed)

    async def one(body: dict[str, Any]) -> Outcome:
        try:
            return await ask(address, body, key=key)
        finally:
            places.release()

    begin, due, tasks = time.perf_counter(), 0.0, []
    for body in requests:
        if load.rate is not None:
            due += draw.expovariate(load.rate)
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        await places.acquire()
        tasks.append(asyncio.create_task(one(body)))
    outcomes = await asyncio.gather(*tasks)
    return list(outcomes), time.perf_counter() - begin


def shares(values: Sequence[float]) -> list[float]:
    """Percentiles of the values at `SHARES`; NaN if there are none."""
    ordered = sorted(values)
    if not ordered:
        return [float("nan")] * len(SHARES)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES]


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Text summary in the form of vLLM's `bench serve`."""
    good = [one for one in outcomes if one.is_whole]
    refused = sum(one.status == 429 for one in outcomes)
    tokens = sum(one.num_tokens for one in good)
    first = [one.arrivals[0] for one in good if one.arrivals]
    per_token = [(one.arrivals[-1] - one.arrivals[0]) / (one.num_tokens - 1) for one in good if one.num_tokens > 1]
    gaps = [b - a for one in good for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)]
    lines = [
        (
            f"{len(good)} answered, {refused} refused (429), {len(outcomes) - len(good) - refused} failed in "
            f"{seconds:.1f} s"
        ),
        f"{len(good) / seconds:.2f} requests/s, {tokens / seconds:.1f} tokens/s",
        "".join(["milliseconds".ljust(28), *(f"p{share * 100:.0f}".rjust(10) for share in SHARES)]),
    ]
    for name, values in (
        ("time to first token", first),
        ("time per token", per_token),
        ("between two pieces", gaps),
        ("whole answer", [one.seconds for one in good]),
    ):
        lines.append(name.ljust(28) + "".join(f"{1000 * v:10.1f}" for v in shares(values)))
    return "\n".join(lines)
