"""HTTP as few clients speak it: HEAD, whole addresses, wrong chunks, two lengths, half a head, and bodies that are no
JSON."""

import gzip
import json
import socket
import time

import httpx2
import pytest
from tests.support.serving import served

LOCAL = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def spoken(port, *parts, wait_s=0.1, timeout=20):
    """What a server answers to some bytes until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as one:
        for part in parts:
            one.sendall(part)
            time.sleep(wait_s)
        found = b""
        try:
            while more := one.recv(65536):
                found += more
        except ConnectionResetError:  # closed before all was read
            pass
    return found


def test_head_is_get_without_a_body(server):
    for path in ("/health", "/version", "/metrics", "/v1/models", "/"):
        found = httpx2.head(server.address + path)
        whole = httpx2.get(server.address + path)
        assert (found.status_code, found.content) == (200, b"")
        assert found.headers["content-type"] == whole.headers["content-type"]
    assert httpx2.head(server.address + "/v1/completions").status_code == 405
    assert httpx2.head(server.address + "/nothing").status_code == 404


def test_a_whole_address_is_its_path(server):
    for target in (b"http://localhost/version", b"HTTP://localhost:80/version"):
        asked = b"GET " + target + b" HTTP/1.1\r\n" + LOCAL + b"Connection: close\r\n\r\n"
        assert spoken(server.port, asked).startswith(b"HTTP/1.1 200 ")


BROKEN = {
    "bad chunk of a foreign host": [POST + b"Host: evil.example\r\n" + JSON + CHUNKED + b"\r\nxyz\r\n"],
    "bad chunk behind the answer": [POST + b"Host: evil.example\r\n" + JSON + CHUNKED + b"\r\n", b"xyz\r\n"],
    "bad chunk": [POST + LOCAL + JSON + CHUNKED + b"\r\nxyz\r\n"],
    "bad chunk behind a good one": [POST + LOCAL + JSON + CHUNKED + b"\r\n1\r\n{\r\n", b"xyz\r\n"],
    "two lengths": [POST + LOCAL + JSON + CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\nGET /version HTTP/1.1\r\n\r\n"],
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_requests_are_answered_once_closed_and_no_traceback(name, broken_server, log):
    found = spoken(broken_server.port, *BROKEN[name])
    assert found.count(b"HTTP/1.1 ") == 1 and found.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403"))
    assert httpx2.get(broken_server.address + "/health").status_code == 200
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def broken_server(folder, log):
    with served(folder, "--idle-s", "2", log=log) as found:
        yield found


def test_a_connection_with_half_a_second_head_is_closed(broken_server):
    asked = b"GET /version HTTP/1.1\r\n" + LOCAL + b"\r\n"
    begin = time.monotonic()
    found = spoken(broken_server.port, asked, b"GET / HT", wait_s=0.3)
    assert found.count(b"HTTP/1.1 200") == 1 and time.monotonic() - begin < 15


WRONG_BODIES = {
    "empty": (b"", "the body is empty"),
    "null": (b"null", "Input should be an object"),
    "a list": (b"[]", "Input should be an object"),
    "cut": (b'{"prompt": ', "the body is no JSON: Expecting value at character 11"),
    "no UTF-8": (b'{"prompt": "\xff"}', "the body is no JSON: it is no UTF-8 at byte 12"),
    "digits": (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "a number of too many digits"),
    "deep": (b"[" * 100_000, "its brackets are nested too deeply"),
    "half a character in raw bytes": (b'{"prompt": "\xed\xa0\x80"}', "it is no UTF-8 at byte 12"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "it is no UTF-8 at byte 0"),
}


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_a_body_that_is_no_request_says_why(server, name):
    data, said = WRONG_BODIES[name]
    kind = {"content-type": "application/json"}
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ):
        answer = httpx2.post(server.address + path, content=data, headers=kind)
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"], error


BODIES = {
    "/v1/completions": b'{"prompt": "a", "max_tokens": 2, %s}',
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, %s}',
    "/v1/responses": b'{"input": "a", "max_output_tokens": 2, %s}',
    "/v1/responses/input_tokens": b'{"input": "a", %s}',
    "/v1/messages": b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, %s}',
    "/v1/messages/count_tokens": b'{"messages": [{"role": "user", "content": "a"}], %s}',
}
NO_VALUES = {
    b"NaN": "number", b"-Infinity": "number", b"1e999": "number", b'"\\ud800"': "half a character", b'{"\\uDFFF": 1}': "half a character",  # noqa: E501
}  # fmt: skip
FIELDS = {
    b'"metadata": {"a": [%s]}': "metadata",
    b'"seed": 1, "user": %s': "user",
    b'"chat_template_kwargs": {"a": %s}': "chat_template_kwargs",
    b'"reasoning": {"effort": %s}': "reasoning",
    b'"text": {"format": {"type": "json_schema", "name": %s, "schema": {"default": %s}}}': "text",
    b'"stream": true, "tools": [{"type": "function", "name": "f", "parameters": {"default": %s}}]': "tools",
}


@pytest.mark.parametrize("path", BODIES)
def test_values_that_json_cannot_hold_are_refused_by_their_field(path, server):
    kind = {"content-type": "application/json"}
    for field, name in FIELDS.items():
        for value, said in NO_VALUES.items():
            data = BODIES[path] % field.replace(b"%s", value)
            answer = httpx2.post(server.address + path, content=data, headers=kind)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400, (data, answer.text)
            assert message.startswith(f"{name}: has") and said in message, (data, message)
    pair = BODIES[path] % b'"user": "\\ud83d\\ude00 \\\\ud800", "metadata": {"a": 1e5}'
    answer = httpx2.post(server.address + path, content=b"\xef\xbb\xbf" + pair, headers=kind)
    assert answer.status_code == 200, answer.text


def test_slashes_at_the_end_and_compressed_bodies(server):
    body = {"prompt": "a", "max_tokens": 2}
    assert httpx2.post(server.address + "/v1/completions/", json=body).status_code == 200
    for path in ("/v1/models", "/health", "/metrics"):
        assert httpx2.get(server.address + path + "/").status_code == 200
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    data = gzip.compress(json.dumps(body).encode())
    found = httpx2.post(server.address + "/v1/completions", content=data, headers=packed)
    assert found.status_code == 415 and "content-encoding: must be identity" in found.text


def test_pages_of_an_origin_that_is_allowed_may_use_openai_s_client(folder):
    with served(folder, "--allow-origin", "https://chat.example.org") as server:
        asked = {
            "origin": "https://chat.example.org",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        found = httpx2.options(server.address + "/v1/chat/completions", headers=asked)
        assert found.status_code == 200
        assert "x-stainless-os" in found.headers["access-control-allow-headers"]
        other = httpx2.options(server.address + "/", headers=asked | {"origin": "https://evil"})
        assert other.status_code == 400


def test_a_call_in_the_history_says_that_the_template_does_not_write_it(server):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ({"content": None}, {}, {"content": ""}):
        said = {"role": "assistant", **content, "tool_calls": [call]}
        body = {"messages": [{"role": "user", "content": "a"}, said]}
        for path in ("/v1/chat/completions", "/tokenize"):
            error = httpx2.post(server.address + path, json=body).json()["error"]
            assert error["param"] == "messages", error
            assert "chat template does not write them" in error["message"]
    body = {"messages": [{"role": "user", "content": None}]}
    error = httpx2.post(server.address + "/v1/chat/completions", json=body).json()["error"]
    assert json.dumps(error).count("messages.0.content") == 1
