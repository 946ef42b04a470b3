"""What happens when clients leave, dawdle or flood, when signals come, when disks are full, and when the engine
fails."""

import asyncio
import contextlib
import errno
import functools
import json
import re
import resource
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn
from tests.support.calls import calls_of
from tests.support.full_screen import full_screen
from tests.support.known_rows import known
from tests.support.serving import events, make_run, served

import expertmesh as em
from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.main import main
from expertmesh.cli.serve import num_threads_of, say_address
from expertmesh.config.server import ServerConfig
from expertmesh.errors import ConfigError
from expertmesh.runs.run_dir import RunDir
from expertmesh.serve.app import ServerApp
from expertmesh.serve.server import _Server
from expertmesh.serve.worker import EngineFailedError, EngineWorker, Ticket
from expertmesh.training.threads import settle_threads

COMPLETE = "/v1/completions"
SHORT = {"prompt": "def main(", "max_tokens": 4, "seed": 1}
LONG = {"prompt": "def main(", "max_tokens": 400, "ignore_eos": True, "stream": True}
PATIENCE_S = 60
get = functools.partial(httpx2.get, timeout=PATIENCE_S)
post = functools.partial(httpx2.post, timeout=PATIENCE_S)


def until(holds):
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def number(server, name):
    """A number of /metrics."""
    text = get(f"{server.address}/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def is_idle(server):
    return not any(
        number(server, f"expertmesh:{name}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def request_bytes(body, path=COMPLETE):
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def open_to(server):
    """A connection."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def is_well(server):
    answer = post(server.address + COMPLETE, json=SHORT)
    return answer.status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("when", ["at once", "in the middle"])
def test_a_client_that_leaves_holds_no_block(server, is_stream, when):
    body = LONG | {"stream": is_stream, "n": 3}
    before = number(server, "expertmesh:generation_tokens_total")
    with open_to(server) as one:
        one.sendall(request_bytes(body))
        if when == "in the middle":
            until(lambda: number(server, "expertmesh:generation_tokens_total") > before + 10)
    until(lambda: is_idle(server))
    assert number(server, "expertmesh:generation_tokens_total") < before + 3 * 400
    assert is_well(server)


def test_more_than_the_queue_holds_is_429_with_retry_after(folder):
    options = ("--max-sequences", "1", "--max-waiting", "7")
    with served(folder, *options) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            one = stack.enter_context(open_to(server))
            one.sendall(request_bytes(LONG | {"stream": False, "n": 4}))
        until(lambda: number(server, "expertmesh:num_requests_waiting") == 7)
        for is_stream in (False, True):
            answer = post(server.address + COMPLETE, json=SHORT | {"stream": is_stream})
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["code"] == "queue_full"
        stack.close()  # both leave, and the next one is answered
        until(lambda: is_well(server))
        assert number(server, "expertmesh:admission_rejections_total") >= 2


def test_sigterm_finishes_streams_that_have_begun_and_refuses_new_ones(folder):
    with served(folder, is_forked=False) as server, httpx2.Client(timeout=PATIENCE_S) as client:
        with client.stream("POST", server.address + COMPLETE, json=LONG) as answer:
            lines = answer.iter_lines()
            got = [next(lines)]
            server.send(signal.SIGTERM)
            until(lambda: get(f"{server.address}/health").status_code == 503)
            refused = post(server.address + COMPLETE, json=SHORT)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            found, is_done = events([*got, *lines])
        assert is_done and found[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0


def test_a_second_signal_ends_it(folder):
    with served(folder) as server, open_to(server) as one:
        one.sendall(request_bytes(LONG | {"n": 8}))
        assert one.recv(10)
        server.send(signal.SIGTERM)
        until(lambda: get(f"{server.address}/health").status_code == 503)
        server.send(signal.SIGTERM)
        assert server.exit_code() == 128 + signal.SIGTERM


def test_a_drain_ends_in_time_and_an_idle_server_at_once(folder):
    with served(folder, "--drain-s", "0.2") as server, open_to(server) as one:
        one.sendall(request_bytes(LONG | {"n": 8}))
        assert one.recv(10)
        server.send(signal.SIGINT)
        assert server.exit_code() == 0


def test_a_server_that_is_killed_breaks_its_streams_and_not_its_port(folder):
    with served(folder) as server:
        with open_to(server) as one:
            one.sendall(request_bytes(LONG))
            assert one.recv(10)
            server.send(signal.SIGKILL)
            server.exit_code()
            with contextlib.suppress(ConnectionResetError):
                while part := one.recv(65536):
                    assert b"[DONE]" not in part  # cut, and the client sees that it is
        with served(folder, "--port", str(server.port)) as again:
            assert is_well(again)


def test_a_log_on_a_full_disk_hurts_nobody(folder):
    with served(folder, "--access-log", log="/dev/full") as server:
        assert all(is_well(server) for _ in range(3))
        assert get(f"{server.address}/nothing").status_code == 404


def few_files():
    """Leave the process few file descriptors."""
    most = len([*Path("/proc/self/fd").iterdir()]) + 24
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_connections_without_a_file_descriptor_wait_and_hold_up_nobody(folder, tmp_path):
    log = tmp_path / "log"
    with served(folder, log=log, prepare=few_files) as server, contextlib.ExitStack() as stack:
        with httpx2.stream("POST", server.address + COMPLETE, json=LONG, timeout=PATIENCE_S) as answer:
            for _ in range(60):
                stack.enter_context(open_to(server))
            found, is_done = events(answer.iter_lines())
        assert is_done and found[-1]["choices"][0]["finish_reason"] == "length"
        until(lambda: "no more connections (Too many open files)" in log.read_text())
        stack.close()
        assert is_well(server)
    assert "Traceback" not in log.read_text() and log.read_text().count("no more connections") == 1


def test_each_shortage_of_file_descriptors_is_told_of_once(caplog):
    server = _Server(uvicorn.Config(""), SimpleNamespace(config=ServerConfig()), print)
    for seconds in (1.0, 2.0, 9.0, 30.0, 31.0):
        loop = SimpleNamespace(time=lambda seconds=seconds: seconds)
        server._on_loop_error(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    assert len(caplog.messages) == 2


def test_slow_readers_and_idle_connections_hold_up_nobody(folder):
    with served(folder, "--idle-s", "3") as server, contextlib.ExitStack() as stack:
        slow = stack.enter_context(open_to(server))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(request_bytes(LONG | {"logprobs": 20}))
        read = slow.recv(1)
        idle = [stack.enter_context(open_to(server)) for _ in range(1000)]
        half = stack.enter_context(open_to(server))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        late = stack.enter_context(open_to(server))
        late.sendall(request_bytes(SHORT)[:-5])
        assert is_well(server)
        read += slow.recv(1)
        for one in (*idle, half):  # closed without a word
            one.settimeout(PATIENCE_S)
            assert one.recv(1) == b""
        late.settimeout(PATIENCE_S)
        assert late.recv(65536).startswith(b"HTTP/1.1 408 ")
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = slow.recv(65536)
            assert part, "the slow one was cut"
            read += part
        assert is_well(server)


def test_a_head_of_a_mebibyte_and_a_body_too_large(server):
    with open_to(server) as one, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 2**20)
        assert one.recv(100).startswith(b"HTTP/1.1 400 ")
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    with open_to(server) as one:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        one.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(200):
                one.sendall(chunk)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(100).startswith(b"HTTP/1.1 413 ")
    assert is_well(server)


def test_keys(folder, tmp_path):
    (tmp_path / "keys").write_text("first\n\n second \n")
    with served(folder, "--api-key-file", str(tmp_path / "keys")) as server:
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
                answer = get(server.address + path, headers=given)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/", "/health"):
            assert get(server.address + path).status_code == 200
        for key in ("first", "second"):
            allowed = {"authorization": f"Bearer {key}", "host": "any.example"}
            assert get(f"{server.address}/v1/models", headers=allowed).status_code == 200


def test_pages_of_an_origin_that_is_allowed(folder):
    with served(folder, "--allow-origin", "https://chat.example") as server:
        for origin, said in (
            ("https://chat.example", "https://chat.example"),
            ("https://b.c", None),
        ):
            answer = get(f"{server.address}/v1/models", headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_machines_need_a_key(host):
    with pytest.raises(ConfigError, match="host"):
        ServerConfig(host=host)
    ServerConfig(host=host, without_key=True)
    ServerConfig(host=host, api_key_file="keys")
    for local in ("127.0.0.1", "localhost", "::1", "127.8.9.1"):
        assert ServerConfig(host=local).is_local
    with pytest.raises(ConfigError, match="without_key"):
        ServerConfig(host=host, without_key=True, api_key_file="keys")


@pytest.mark.parametrize("recipe", known(["translate-test", "swin-test"]))
def test_models_that_are_no_decoders_are_refused_by_name(recipe, tmp_path, capsys):
    config = parse_run_config([recipe]).config
    (tmp_path / "run").mkdir()
    RunDir(tmp_path / "run").write_description(config, recipe=recipe, files={})
    assert main(["serve", str(tmp_path / "run"), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"family (seq2seq|swin), which writes no text", said), said


def test_wrong_options_are_refused_in_one_line(folder, capsys, tmp_path):
    (tmp_path / "none").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, said in (
            (["--port", "70000"], "--port 70000"),
            (["--port", port], f"--port {port}: cannot be listened on"),
            (
                ["--host", "0.0.0.0"],
                (
                    "--host 0.0.0.0: is reached by other machines, and there is no key; give --api-key-file or set "
                    "EXPERTMESH_API_KEY, or"
                ),
            ),
            (["--without-key", "--host", "a..b"], "--host a..b: is no address of this machine (a part of it is empty"),
            (["--without-key", "--host", "256.1.1.1"], "--host 256.1.1.1: is no address of this machine ("),
            (
                ["--without-key", "--api-key-file", "keys"],
                "--without-key: has no effect beside --api-key-file",
            ),
            (["--num-draft-tokens", "65"], "must be at most 64; for example 64"),
            (["--num-redundant-experts", "2"], "without --enable-eplb; leave it out, or add --en"),
            (
                ["--deterministic", "--implementation", "transformers"],
                "--deterministic: needs linears and norms of ours, and --implementation transformers",
            ),
            (["--api-key-file", str(tmp_path / "gone")], "cannot be read"),
            (["--api-key-file", str(tmp_path / "none")], "has no key"),
            (["--max-waiting", "-1"], "--max-waiting -1"),
            (["--dtype", "float7"], "--dtype float7"),
            (["--block-size", "0"], "--block-size 0"),
            (["--nonsense"], "unknown option --nonsense"),
        ):
            assert main(["serve", str(folder), *words]) == 2
            error = capsys.readouterr().err
            assert said in error and error.count("\n") == 1


def test_a_model_without_a_template_answers_no_conversations(tmp_path):
    config = make_run(tmp_path / "plain", marks=())
    with served(config) as server:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = post(f"{server.address}{path}", json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "no_chat_template"
            for fix in ("prompt", "/v1/completions", "chat_template.jinja", "run trained on"):
                assert fix in error["message"]
        assert server.said.read_text().endswith("; completions only: no chat template\n")
        assert is_well(server)


def test_a_model_with_a_template_is_said_to_have_no_limits(server):
    (line,) = server.said.read_text().splitlines()
    assert line.endswith("/v1 (OpenAI's interface)")


def tiny(folder):
    return em.Engine(folder, num_blocks=32, prefix_caching=True)


async def answered(worker, prompt, params):
    ticket = Ticket([prompt], [params])
    worker.submit(ticket)
    last = {}
    try:
        async for news in ticket.changes():
            last |= news
    finally:
        worker.close(ticket)
    return last[0].token_ids


def test_a_step_that_fails_ends_its_requests_and_three_end_the_engine(folder, monkeypatch):
    engine, fails = tiny(folder), [True]
    step = engine.step

    def failing():
        if fails[0]:
            raise MemoryError("no memory")
        return step()

    monkeypatch.setattr(engine, "step", failing)
    params = em.SamplingParams(temperature=0, max_tokens=5)

    async def story():
        worker = EngineWorker(engine)
        worker.start(asyncio.get_running_loop())
        for _ in range(2):
            with pytest.raises(EngineFailedError, match="MemoryError: no memory"):
                await answered(worker, [1, 2, 3], params)
        fails[0] = False  # two failures are no death, and leave nothing behind
        assert worker.is_ready and len(await answered(worker, [1, 2, 3], params)) == 5
        assert engine.stats().num_used_blocks == 0
        fails[0] = True
        for _ in range(4):
            with pytest.raises(EngineFailedError):
                await answered(worker, [1, 2, 3], params)
        assert not worker.is_ready and worker.num_answers == 0
        worker.stop()

    asyncio.run(story())


def test_an_address_that_cannot_be_printed_is_logged(caplog):
    with full_screen():
        say_address("tiny", "http://127.0.0.1:8000")
    (said,) = caplog.messages
    assert said.startswith("serving tiny at http://127.0.0.1:8000 (the page)")
    assert said.endswith("(standard output cannot be written: No space left on device)")


def test_the_threads_of_a_server_are_measured_once(folder):
    with calls_of(settle_threads) as calls:
        found = num_threads_of(tiny(folder))
    ((_, threads),) = calls
    assert found == threads.count >= 1


def test_a_dead_engine_says_so_to_everybody(folder):
    async def story():
        app = ServerApp(tiny(folder), ServerConfig(), model_name="tiny", version="0")
        app.start()
        transport = httpx2.ASGITransport(app=app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.post(COMPLETE, json=SHORT)).status_code == 200
            app.engine.step = lambda: 1 / 0
            for is_stream in (False, True, False):
                answer = await client.post(COMPLETE, json=SHORT | {"stream": is_stream})
                assert answer.status_code == 500 and "ZeroDivisionError" in answer.text
            for path, body in (("/health", None), (COMPLETE, SHORT)):
                answer = await client.request("POST" if body else "GET", path, json=body)
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "failed"
        app.stop()

    asyncio.run(story())


def test_an_engine_that_fails_in_the_middle_of_a_stream_says_so_in_it(folder):
    async def story():
        app = ServerApp(tiny(folder), ServerConfig(), model_name="tiny", version="0")
        app.start()
        step, count = app.engine.step, [0]

        def later():
            count[0] += 1
            if count[0] > 5:
                raise RuntimeError("a kernel is gone")
            return step()

        app.engine.step = later
        transport = httpx2.ASGITransport(app=app.asgi)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post(COMPLETE, json=LONG)
        found, is_done = events(answer.text.split("\n\n"))
        assert answer.status_code == 200 and is_done
        assert "a kernel is gone" in found[-1]["error"]["message"] and len(found) > 1
        app.stop()

    asyncio.run(story())
