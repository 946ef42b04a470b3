"""`make soak-hostile`: one client does harm, and 50 others must lose nothing.

For each kind of harm a round: 50 clients stream completions, one repeats its requests as fast as they are answered. A
line says how many of the 50's requests were whole, how long they waited for their first token beside a round without
harm, and what the harmful ones got. It ends with an error where an answer of the 50 is lost, or a harmful request gets
anything but the answers that it should.
"""

import argparse
import contextlib
import itertools
import json
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.serving import Served, make_run, served
from tests.support.soak import soak

ORIGIN = "https://chat.example.org"
IDLE_S = 5
_LATE = -1
"""In the place of a status: no answer in time."""
_TEMPLATE = (
    "{% if messages[0].content == 'loops' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% "
    "endfor %}"
    "{% elif messages[0].content == 'power' %}{{ (messages|length + 2) ** 30000000 }}"
    "{% elif messages[0].content == 'long' %}{% for i in range(99999) %}{{ 'a ' * 999 }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|user|>{{ message.content }}<|endoftext|>{% endfor %}<|assistant|>"
)


def post(server: Served, path: str, body: dict, *, timeout: float = 60) -> int:
    """Status of a request."""
    head = {"content-type": "application/json"}
    request = urllib.request.Request(server.address + path, json.dumps(body).encode(), head)
    return _status(request, timeout)


def _status(request: urllib.request.Request, timeout: float) -> int:
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        error.read()
        return error.code
    except TimeoutError:
        return _LATE
    except OSError as error:
        return _LATE if isinstance(getattr(error, "reason", None), TimeoutError) else 0


def said(text: str) -> dict:
    """Body of a chat."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


def schemas(server: Served) -> Iterator[int]:
    """Schemas that take minutes to compile, each a new one, through each door that takes one."""
    for number in itertools.count():
        schema = {
            "type": "object",
            "properties": {f"a{number}": {"type": "integer", "multipleOf": 999_979}},
            "required": [f"a{number}"],
        }
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        for more in (
            {"response_format": form},
            {"guided_json": {"enum": [f"{number} {i}" for i in range(200_000)]}},
            {"tools": [tool], "tool_choice": "required"},
            {"guided_regex": f"{number}(a?){{500}}a{{500}}"},
        ):
            yield post(server, "/v1/chat/completions", said("a") | more)


def prompts(server: Served) -> Iterator[int]:
    """8 MB of text for a model with room for 512 tokens."""
    text = "hello " * 1_300_000
    while True:
        yield post(server, "/v1/completions", {"prompt": text})
        yield post(server, "/v1/chat/completions", said(text))
        yield post(server, "/tokenize", {"prompt": text})
        yield post(server, "/v1/responses", {"input": text})
        yield post(server, "/v1/messages", said(text))


def templates(server: Served) -> Iterator[int]:
    """Messages on which the model's template runs without an end, or takes all memory."""
    while True:
        for text in ("loops", "power", "long"):
            yield post(server, "/v1/chat/completions", said(text))


def connections(server: Served) -> Iterator[int]:
    """200 connections that send a request and half of the next; 200 if the server closes all within thrice its time."""
    while True:
        with contextlib.ExitStack() as stack:
            held = [
                stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", server.port))))
                for _ in range(200)
            ]
            for one in held:
                one.settimeout(60)
                one.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for one in held:
                one.recv(9999)
                one.sendall(b"GET / HT")
            begin = time.monotonic()
            try:
                while sum(len(one.recv(9999)) for one in held):
                    pass
                closed = time.monotonic() - begin < 3 * IDLE_S
            except ConnectionError:
                closed = True
            except TimeoutError:
                closed = False
        yield 200 if closed else _LATE


def preflights(server: Served) -> Iterator[int]:
    """Preflights of a browser's openai package."""
    head = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    address = f"{server.address}/v1/chat/completions"
    while True:
        yield _status(urllib.request.Request(address, headers=head, method="OPTIONS"), 60)


HARMS: dict[str, tuple[Callable[[Served], Iterator[int]], set[int]]] = {
    "none": (lambda server: iter(()), set()),
    "schemas": (schemas, {400, 429}),
    "prompts": (prompts, {400}),
    "templates": (templates, {400}),
    "connections": (connections, {200}),
    "preflights": (preflights, {200}),
}
"""Kinds of harm, with the answers that each should get."""


def beside(server: Served, harm: Iterator[int], *, clients: int, seconds: float):
    """A round of clients beside a harm; what the harm got, with its round."""
    got: Counter[int] = Counter()
    is_over = threading.Event()

    def work() -> None:
        for status in harm:
            got[status] += 1
            if is_over.is_set():
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    found = soak(server, clients=clients, seconds=seconds, share=0.0)
    is_over.set()
    thread.join(120)
    return found, got


def first_token_ms(outcomes, share: float) -> float:
    """Milliseconds until the first token of this share of the requests, at most."""
    waits = sorted(o.arrivals[0] for o in outcomes if o.arrivals)
    return 1000 * waits[min(int(share * len(waits)), len(waits) - 1)]


def main() -> int:
    """Prints a line per round; exit code 1: somebody lost something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--only", choices=[*HARMS][1:], nargs="+", default=[*HARMS][1:])
    options = parser.parse_args()
    bad = []
    with tempfile.TemporaryDirectory() as place:
        folder = make_run(Path(place) / "tiny")
        (folder / "hub").mkdir(exist_ok=True)
        told = {"chat_template": _TEMPLATE, "eos_token": "<|endoftext|>"}
        (folder / "hub" / "tokenizer_config.json").write_text(json.dumps(told))
        words = ["--num-blocks", "512", "--allow-origin", ORIGIN, "--idle-s", str(IDLE_S)]
        with served(folder, *words, is_forked=False) as server:
            soak(server, clients=options.clients, seconds=3, share=0.0)  # warms up
            for name in ["none", *options.only]:
                harm, allowed = HARMS[name]
                found, got = beside(server, harm(server), clients=options.clients, seconds=options.seconds)
                whole = sum(o.is_whole for o in found.outcomes)
                lost = len(found.outcomes) - whole
                print(
                    f"{name:<12} {whole:5} whole, {lost} lost, {whole / found.seconds:6.1f} requests/s, first token "
                    f"p50 {first_token_ms(found.outcomes, 0.5):.0f} ms, p99 {first_token_ms(found.outcomes, 0.99):.0f} "
                    "ms, memory "
                    f"{found.rss_bytes / 2**20:.0f} MiB; harmful requests by status: {dict(got)}",
                    flush=True,
                )
                if lost or found.held or set(got) - allowed:
                    bad.append(name)
    if bad:
        print(
            f"error: lost answers, or wrong ones to the harmful client: {', '.join(bad)}",
            file=sys.stderr,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
