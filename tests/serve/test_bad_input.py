"""Every kind of bad input, fired between good requests: each is refused by its field, and the good ones never
change."""

import asyncio
import json
import socket

import httpx2
import pytest
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from tokenizers import Tokenizer

from expertmesh.serve.app import _on_wrong_body
from expertmesh.serve.schema import CompletionRequest

GOOD = {"prompt": "def main(", "max_tokens": 6, "seed": 1}
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "user", "content": "hi"}]
PARTS = [{"type": "text", "text": ""}]


def with_(**fields):
    return {"prompt": "x", "max_tokens": 2} | fields


def chat(**fields):
    return {"messages": SAID, "max_tokens": 2} | fields


BAD = [
    # path, body, status, field
    (COMPLETE, {}, 400, "prompt"),
    (COMPLETE, [], 400, None),
    (COMPLETE, "text", 400, None),
    (COMPLETE, None, 400, None),
    (COMPLETE, {"prompt": None}, 400, "prompt"),
    (COMPLETE, {"prompt": []}, 400, "prompt"),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETE, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETE, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETE, {"prompt": [10**9]}, 400, "prompt"),
    (COMPLETE, {"prompt": [10**30]}, 400, "prompt"),
    (COMPLETE, {"prompt": [True]}, 400, "prompt"),
    (COMPLETE, {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETE, {"prompt": [5] * 600}, 400, "prompt"),
    (COMPLETE, {"prompt": "word " * 2000}, 400, "prompt"),
    (COMPLETE, {"prompt": "\ud800"}, 400, "prompt"),
    (COMPLETE, with_(model="gpt-5"), 404, "model"),
    (COMPLETE, with_(model=5), 400, "model"),
    (COMPLETE, with_(max_tokens=-1), 400, "max_tokens"),
    (COMPLETE, with_(max_tokens="5"), 400, "max_tokens"),
    (COMPLETE, with_(max_tokens=1.5), 400, "max_tokens"),
    (COMPLETE, with_(n=0), 400, "n"),
    (COMPLETE, with_(n=129), 400, "n"),
    (COMPLETE, with_(n=True), 400, "n"),
    (COMPLETE, with_(temperature=-0.1), 400, "temperature"),
    (COMPLETE, with_(temperature=float("nan")), 400, "temperature"),
    (COMPLETE, with_(temperature=float("inf")), 400, "temperature"),
    (COMPLETE, with_(temperature="hot"), 400, "temperature"),
    (COMPLETE, with_(top_p=1.5), 400, "top_p"),
    (COMPLETE, with_(top_k=-2), 400, "top_k"),
    (COMPLETE, with_(min_p=2), 400, "min_p"),
    (COMPLETE, with_(seed=0.5), 400, "seed"),
    (COMPLETE, with_(stop=["a"] * 17), 400, "stop"),
    (COMPLETE, with_(stop=""), 400, "stop"),
    (COMPLETE, with_(stop=["a", ""]), 400, "stop"),
    (COMPLETE, with_(stop="a" * 2000), 400, "stop"),
    (COMPLETE, with_(stop=5), 400, "stop"),
    (COMPLETE, with_(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (COMPLETE, with_(stop_token_ids=[10**6]), 400, "stop_token_ids"),
    (COMPLETE, with_(logit_bias={"x": 1}), 400, "logit_bias"),
    (COMPLETE, with_(logit_bias={"1": 200}), 400, "logit_bias"),
    (COMPLETE, with_(logit_bias={"999999": 1}), 400, "logit_bias"),
    (COMPLETE, with_(logit_bias=[1]), 400, "logit_bias"),
    (COMPLETE, with_(presence_penalty=3), 400, "presence_penalty"),
    (COMPLETE, with_(frequency_penalty=-3), 400, "frequency_penalty"),
    (COMPLETE, with_(repetition_penalty=0), 400, "repetition_penalty"),
    (COMPLETE, with_(logprobs=21), 400, "logprobs"),
    (COMPLETE, with_(logprobs=True), 400, "logprobs"),
    (COMPLETE, with_(echo="yes"), 400, "echo"),
    (COMPLETE, with_(stream="yes"), 400, "stream"),
    (COMPLETE, with_(stream=True, stream_options=5), 400, "stream_options"),
    (COMPLETE, with_(stream=True, prompt=[10**9]), 400, "prompt"),
    (COMPLETE, with_(suffix="end"), 400, "suffix"),
    (COMPLETE, with_(best_of=3), 400, "best_of"),
    (COMPLETE, with_(guided_regex="(?=a)b"), 400, "guided_regex"),
    (COMPLETE, with_(n=128, prompt=["a"] * 1000), 429, "n"),
    (COMPLETE, with_(prompt=["word " * 1000] * 1000), 429, "n"),  # before they are tokenised
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": SAID * 10_001}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": PARTS * 10_001}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content.0.type",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 3000}]}, 400, "prompt"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools.0.function"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(functions=[{}]), 400, "functions"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities"),
    (CHAT, chat(audio={"voice": "a"}), 400, "audio"),
    (CHAT, chat(top_logprobs=21, logprobs=True), 400, "top_logprobs"),
    (CHAT, chat(logprobs=3), 400, "logprobs"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"messages": 5}, 400, "messages"),
    ("/tokenize", {"messages": SAID * 10_001}, 400, "messages"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
]
SAID_OF = [
    # path, body, message
    (COMPLETE, with_(prompt=5), "prompt: Input should be a valid string or a valid list"),
    (COMPLETE, with_(prompt=[]), "prompt: Value should have at least 1 item"),
    (COMPLETE, with_(prompt=[[]]), "prompt.0: Value should have at least 1 item"),
    (
        COMPLETE,
        with_(prompt=[True]),
        "prompt.0: Input should be a valid integer or a valid string or a valid list",
    ),
    (COMPLETE, with_(prompt=[1, "a"]), "prompt.1: Input should be a valid integer"),
    (COMPLETE, with_(prompt=["a", 1]), "prompt.1: Input should be a valid string"),
    (COMPLETE, with_(prompt=[[1], [2, "a"]]), "prompt.1.1: Input should be a valid integer"),
    (COMPLETE, with_(prompt=["a"] * 1025), "prompt: List should have at most 1024 items"),
    (COMPLETE, with_(prompt=[-1]), "prompt.0: Input should be greater than or equal to 0"),
    (COMPLETE, with_(logit_bias={"9" * 5000: 1}), f"logit_bias='{'9' * 56}...: must be a token id; give one"),
    (COMPLETE, with_(stop=["a"] * 50), "stop: List should have at most 16 items"),
    (COMPLETE, with_(stop=["a", ""]), "stop.1: String should have at least 1 character"),
    (COMPLETE, 5, "Input should be an object"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0.type: 'image_url' is not served (only text is)",
    ),
    ("/tokenize", {}, "prompt or messages: Field required"),
    ("/tokenize", {"prompt": 5}, "prompt: Input should be a valid string"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    ("/tokenize", 5, "Input should be an object"),
]
RAW = [
    # body that is no JSON, or hard on parsers
    (b"", 400),
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[" * 100_000, 400),
    (b'{"prompt": ' + b"9" * 10_000 + b"}", 400),
    (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", 400),
    (b'{"prompt": "a", "max_tokens": 1e999}', 400),
    (b'{"prompt": "' + b"a" * 9_000_000 + b'"}', 413),
]


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.address, timeout=60) as one:
        yield one


def text(client):
    answer = client.post(COMPLETE, json=GOOD)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def refused(answer, status, field=None):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and len(answer.content) < 1500
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["message"]
    assert field is None or error["param"] == field


def test_each_bad_request_is_refused_alone_between_good_ones(client):
    expected = text(client)
    for number, (path, body, status, field) in enumerate(BAD):
        data = json.dumps(body)  # writes NaN and lone surrogates, as careless clients do
        answer = client.post(path, content=data, headers={"content-type": "application/json"})
        try:
            refused(answer, status, field)
        except AssertionError as error:
            raise AssertionError(f"{path} {data[:100]}: {error}") from None
        if number % 10 == 0:
            assert text(client) == expected
    for data, status in RAW:
        answer = client.post(COMPLETE, content=data, headers={"content-type": "application/json"})
        refused(answer, status)
        assert text(client) == expected


def test_reasons_are_of_the_form_that_fits_best(client):
    for path, body, message in SAID_OF:
        answer = client.post(path, json=body)
        refused(answer, 400)
        assert answer.json()["error"]["message"].startswith(message), (body, answer.text)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [True] * 1_000_000},
        {"prompt": "x", "logit_bias": {str(i): 200 for i in range(100_000)}},
    ],
    ids=["prompt", "logit_bias"],
)
def test_a_million_errors_are_refused_at_the_first(fields):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(fields)
    assert caught.value.error_count() < 9


def test_only_the_first_errors_of_a_body_are_looked_at():
    one = {"type": "int_type", "loc": ("body", "n"), "msg": "Input should be a number"}
    error = RequestValidationError([one] * 100 + [None], body={"n": "x"})
    request = Request({"type": "http", "path": COMPLETE, "headers": [], "server": ("localhost", 80)})
    answer = asyncio.run(_on_wrong_body(request, error))
    assert json.loads(answer.body)["error"]["param"] == "n"


def test_end_tokens_that_leave_none_before_min_tokens_are_refused(client, folder):
    every = [*range(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size())]
    for stream in (False, True):
        body = with_(min_tokens=1, stop_token_ids=every, stream=stream)
        refused(client.post(COMPLETE, json=body), 400, "min_tokens")
    assert client.post(COMPLETE, json=with_(stop_token_ids=every)).status_code == 200


def test_what_changes_nothing_is_accepted(client):
    for body in (
        with_(best_of=1, n=1, user="me", unknown_field=None, metadata={"a": [1]}, suffix=""),
        with_(prompt="", top_p=0, seed=-5, logit_bias={}, top_k=-1),
        with_(max_tokens=10**12, min_tokens=10**12, stop=["\n"]),
        with_(prompt=[5.0], max_tokens=2.0),
    ):
        assert client.post(COMPLETE, json=body).status_code == 200
    for body in (
        chat(tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"]),
        chat(top_logprobs=3, stream_options={"include_usage": True}),
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *SAID], "max_tokens": 1},
    ):  # fmt: skip
        assert client.post(CHAT, json=body).status_code == 200


def test_paths_methods_and_types(client):
    refused(client.get("/nothing"), 404)
    refused(client.get("/v1/models/other"), 404, "model")
    answer = client.get(COMPLETE)
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert client.post("/health").headers["allow"] == "GET"
    refused(client.post(COMPLETE, content=b"prompt=a"), 415)
    page = {"content-type": "text/plain", "origin": "http://evil.example"}
    refused(client.post(COMPLETE, content=json.dumps(GOOD), headers=page), 415)
    refused(client.get("/v1/models", headers={"host": "evil.example"}), 403)
    assert client.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200
    crossed = client.get("/v1/models", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in crossed.headers


def test_bytes_that_are_no_http_get_json_too(server):
    for data in (b"\x16\x03\x01\x00\n\n\n\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as one:
            one.sendall(data)
            found = b""
            while part := one.recv(65536):
                found += part
        assert found.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in found


def test_tokens_there_and_back(client):
    for prompt in ("def main(", "é 🎉"):
        found = client.post(
            "/tokenize",
            json={"prompt": prompt, "add_special_tokens": False, "return_token_strs": True},
        ).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == prompt
    end = {"prompt": "<|endoftext|>", "add_special_tokens": False}
    assert client.post("/tokenize", json=end).json()["tokens"] == [0]
    inside = {"prompt": "a<|endoftext|>", "add_special_tokens": False}
    assert 0 not in client.post("/tokenize", json=inside).json()["tokens"]
    talk = client.post("/tokenize", json={"messages": SAID}).json()["tokens"]
    usage = client.post(CHAT, json=chat()).json()["usage"]
    assert len(talk) == usage["prompt_tokens"]
    information = client.get("/tokenizer_info").json()
    assert information["eos_token"] == "<|endoftext|>" and information["chat_template"]
