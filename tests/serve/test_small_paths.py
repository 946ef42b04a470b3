"""Paths and headers that clients of other servers ask for: ids, keys, hosts, health, prefixes, and what is not here."""

import os
import re
import socket

import httpx2
import openai
import pytest
from tests.support.serving import served

from expertmesh.cli.main import main
from expertmesh.config.base import KEY_VARIABLE
from expertmesh.config.server import ServerConfig
from expertmesh.errors import ConfigError
from expertmesh.serve.absent import why_not

ASKED = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize("given", ["abc-1:2/3=4@5", "x" * 128, "x" * 129, "a b", "é", ""])
def test_every_answer_has_the_request_s_id_or_one_of_its_own(server, given):
    is_kept = re.fullmatch("[!-~]{1,128}", given) is not None
    for path, method in (("/health", "GET"), ("/nothing", "GET"), ("/v1/completions", "POST")):
        head = {"x-request-id": given.encode()}
        found = httpx2.request(method, server.address + path, headers=head)
        if is_kept:
            assert found.headers["x-request-id"] == given
        else:
            assert re.fullmatch("[0-9a-f]{32}", found.headers["x-request-id"])


def test_streams_and_broken_requests_have_an_id_too(server):
    with httpx2.stream("POST", f"{server.address}/v1/completions", json=ASKED | {"stream": True}) as one:
        assert len(one.headers["x-request-id"]) == 32
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as one:
        one.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert b"x-request-id: " in one.recv(65536).lower()


def test_ping_is_health_and_prefixes_are_forgotten(server):
    for method in ("GET", "POST", "HEAD"):
        assert httpx2.request(method, f"{server.address}/ping").status_code == 200
    body = ASKED | {"prompt": "def main(" * 20}

    def post():
        return httpx2.post(f"{server.address}/v1/completions", json=body).json()

    post()
    assert post()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    reset = f"{server.address}/reset_prefix_cache"
    assert httpx2.post(reset, headers={"origin": "https://evil.example"}).status_code == 403
    assert post()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    found = httpx2.post(reset)
    assert (found.status_code, found.content) == (200, b"")
    assert post()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_keys_come_from_the_environment_and_a_file_in_either_header(folder, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("of-file\n")
    monkeypatch.setenv(KEY_VARIABLE, " of-environment ")
    with served(folder, "--api-key-file", str(tmp_path / "keys"), is_forked=False) as server:
        for head, status in (
            ({}, 401),
            ({"x-api-key": "of-file"}, 200),
            ({"x-api-key": "of-environment"}, 200),
            ({"authorization": "Bearer of-environment"}, 200),
            ({"authorization": "Basic of-environment"}, 401),
            ({"x-api-key": "other"}, 401),
            ({"x-api-key": "other", "authorization": "Bearer of-file"}, 200),
        ):
            found = httpx2.get(f"{server.address}/v1/models", headers=head)
            assert found.status_code == status, head
        assert httpx2.get(f"{server.address}/ping").status_code == 200


def test_a_blank_key_of_the_environment_is_refused(folder, monkeypatch, capsys):
    assert ServerConfig().is_guarded is False
    monkeypatch.setenv(KEY_VARIABLE, " ")
    assert main(["serve", str(folder), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert f"{KEY_VARIABLE}: is blank" in said and said.count("\n") == 1
    monkeypatch.setenv(KEY_VARIABLE, "a")
    assert ServerConfig(host="0.0.0.0").is_guarded
    assert os.environ[KEY_VARIABLE] == "a"


def test_other_names_of_this_machine_are_allowed_by_an_option(folder):
    with served(folder, "--allow-host", "Host.docker.internal", "em") as server:
        for host, status in (
            ("host.docker.internal:8000", 200),
            ("HOST.DOCKER.INTERNAL", 200),
            ("em", 200),
            ("localhost", 200),
            ("evil.example", 403),
            ("xem", 403),
        ):
            found = httpx2.get(f"{server.address}/version", headers={"host": host})
            assert found.status_code == status, host


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allow_host": ["a"], "api_key_file": "keys"}, "has no effect"),
        ({"allow_host": ["a"], "host": "0.0.0.0", "without_key": True}, "has no effect"),
        ({"allow_host": ["http://a"]}, "without scheme and port"),
        ({"allow_host": ["*"]}, "without scheme and port"),
        ({"allow_host": ["a:80"]}, "without scheme and port"),
        ({"allow_host": [""]}, "must not be empty"),
    ],
)
def test_wrong_hosts_are_one_line(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        ServerConfig(**given)
    assert "\n" not in str(caught.value)


def test_what_is_not_here_says_what_to_use(client, server):
    for ask in (
        lambda: client.embeddings.create(model="tiny", input="a"),
        lambda: client.batches.list(),
        lambda: client.files.create(file=b"{}", purpose="batch"),
        lambda: client.images.generate(prompt="a"),
        lambda: client.moderations.create(input="a"),
    ):
        with pytest.raises(openai.NotFoundError, match="is not here: "):
            ask()
    for path in ("/score", "/v1/rerank", "/v1/batches/x", "/chat/completions", "/docs"):
        found = httpx2.post(server.address + path, json={})
        assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")
        assert why_not(path) == found.json()["error"]["message"]
    assert "no such path" in httpx2.get(f"{server.address}/v1/scores").json()["error"]["message"]
