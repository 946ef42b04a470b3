"""Answers of a schema, list, expression or grammar over HTTP: the spellings, streams, and what cannot be kept."""

import asyncio
import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import httpx2
import jsonschema
import pytest
from tests.support.serving import events

from expertmesh.config.server import ServerConfig
from expertmesh.engine.engine import Engine
from expertmesh.serve.app import ServerApp
from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import RequestReader
from expertmesh.serve.schema import CompletionRequest

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
SAID = [{"role": "user", "content": "hi"}]


def post(server, fields, path="/v1/completions"):
    body = {"max_tokens": 200} | fields
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": SAID}
    head = {"content-type": "application/json"}
    return httpx2.post(server.address + path, content=json.dumps(body), headers=head, timeout=120)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": STRICT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["response_format", "guided_json", "its text", "structured_outputs"],
)
def test_answers_validate(server, fields):
    for path in ("/v1/completions", "/v1/chat/completions"):
        choices = post(server, fields | {"n": 3, "seed": 1}, path).json()["choices"]
        for one in choices:
            text = one["text"] if "text" in one else one["message"]["content"]
            assert one["finish_reason"] == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("path", ["completions", "responses", "messages"])
def test_line_ends_of_unicode_break_no_event(server, path):
    text = "a\u2028b\x85c\u2029"
    asked = {
        "completions": {"prompt": "x", "max_tokens": 40},
        "responses": {"input": "x", "max_output_tokens": 40},
        "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40},
    }
    body = asked[path] | {"guided_choice": [text], "stream": True}
    with httpx2.stream("POST", f"{server.address}/v1/{path}", json=body, timeout=60) as answer:
        lines = [one for one in answer.iter_lines() if not one.startswith("event: ")]
    found, _ = events(lines)
    pieces = {
        "completions": lambda one: one["choices"][0]["text"],
        "responses": lambda one: one["delta"] if one["type"] == "response.output_text.delta" else "",
        "messages": lambda one: one.get("delta", {}).get("text", ""),
    }
    assert "".join(map(pieces[path], found)) == text


def test_a_stream_is_the_same_and_any_object_is_one(server):
    fields = {"response_format": STRICT, "seed": 5, "stream": True}
    lines = post(server, fields).text.splitlines()
    events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
    text = "".join(one["choices"][0]["text"] for one in events)
    assert text == post(server, fields | {"stream": False}).json()["choices"][0]["text"]
    jsonschema.validate(json.loads(text), SCHEMA)
    for seed in range(5):
        fields = {"response_format": {"type": "json_object"}, "seed": seed}
        (one,) = post(server, fields, "/v1/chat/completions").json()["choices"]
        if one["finish_reason"] == "stop":
            assert isinstance(json.loads(one["message"]["content"]), dict)


def wrapped(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", wrapped(None)),
        ("response_format", wrapped({"type": "nope"})),
        ("response_format", wrapped({"type": "array", "uniqueItems": True})),
        ("guided_json", "{"),
        ("guided_json", []),
        ("guided_json", '{"const": "\\ud800"}'),
        ("guided_json", reduce(lambda inner, _: {"items": inner}, range(200), {})),
        ("structured_outputs", {"regex": "("}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"json": {"pattern": "(", "type": "string"}}),
        ("guided_regex", "(?=a)b"),
        ("guided_regex", ""),
        ("guided_choice", ["a", 1]),
        ("guided_choice", ["\ud800"]),
        ("guided_grammar", "start: "),
        ("grammar", "root ::= ("),
        ("ebnf", "root ::= \\"),
    ],
)
def test_what_cannot_be_kept_is_400_that_names_the_field(server, field, value):
    found = post(server, {field: value})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, field)
    assert field in error["message"] and "\n" not in error["message"]
    assert post(server, {"max_tokens": 2}).status_code == 200


def test_two_spellings_at_once_are_refused(server):
    found = post(server, {"response_format": STRICT, "guided_json": SCHEMA})
    assert found.status_code == 400 and "beside" in found.json()["error"]["message"]


def test_without_llguidance_the_extra_is_named(folder, monkeypatch):
    reader = RequestReader(Engine(folder), ServerConfig(), "tiny")
    request = CompletionRequest(prompt="x", guided_json=SCHEMA)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"expertmesh\[json\]") as caught:
        reader.completion(request)
    assert (caught.value.status, caught.value.param) == (400, "guided_json")


MATCHES = {
    "choice": (
        {"guided_choice": ["yes", 'n"o\\\n', "日本", "yes and no"]},
        r'yes|n"o\\\n|日本|yes and no',
    ),
    "one choice": ({"structured_outputs": {"choice": ["one"]}}, "one"),
    "regex": ({"guided_regex": r"^[a-c]{2,5}-\d+(é|🎉)?$"}, r"[a-c]{2,5}-\d+(é|🎉)?"),
    "any character": ({"regex": ".{3,9}"}, ".{3,9}"),
    "Lark": ({"guided_grammar": 'start: "a" x\nx: /[0-9]{1,4}/ | "(" x ")"'}, r"a\(*[0-9]{1,4}\)*"),
    "GBNF": ({"grammar": 'root ::= ("ab" | "c"){1,3} "!"'}, "(ab|c){1,3}!"),
}


@pytest.mark.parametrize(("fields", "expression"), MATCHES.values(), ids=MATCHES)
def test_an_answer_that_ends_by_stop_matches(server, fields, expression):
    for path in ("/v1/completions", "/v1/chat/completions"):
        found = post(server, fields | {"n": 6, "seed": 1, "max_tokens": 60}, path)
        assert found.status_code == 200, found.text
        ended = 0
        for one in found.json()["choices"]:
            text = one["text"] if "text" in one else one["message"]["content"]
            if one["finish_reason"] == "stop":
                assert re.fullmatch(expression, text), text
                ended += 1
        assert ended


GUIDE_BOMBS = {
    "expression": {"guided_regex": "(a?){500}a{500}"},
    "much to look back on": {"guided_regex": "(.*a){1000}"},
    "huge repetition": {"guided_grammar": 'start: x{0,100000}\nx: y{0,100000}\ny: "a"? "b"?'},
    "ambiguous": {"guided_grammar": 'start: s\ns: s s s | s s | "a" | "ab" | "b" |'},
    "deep": {"grammar": "root ::= " + "(" * 50_000},
    "many choices": {"guided_choice": [f"choice number {i}" for i in range(200_000)]},
    "long choices": {"guided_choice": ["x" * 2**20, "y"]},
}


@pytest.mark.parametrize("fields", GUIDE_BOMBS.values(), ids=GUIDE_BOMBS)
def test_guides_that_take_long_hold_up_nobody(server, fields):
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, server, fields | {"max_tokens": 40})
        longest = 0.0
        while not asked.done():
            begin = time.monotonic()
            assert post(server, {"max_tokens": 1}).status_code == 200
            longest = max(longest, time.monotonic() - begin)
        found = asked.result()
    assert longest < 3, longest
    assert found.status_code in (200, 400), found.text
    if found.status_code == 200:
        assert found.json()["choices"][0]["finish_reason"] in ("stop", "length")
    else:
        assert "\n" not in found.json()["error"]["message"]
        assert found.json()["error"]["param"] in (None, *fields)


BOMB = {"type": "array", "items": {"type": "integer", "multipleOf": 999_979}}


def test_a_schema_that_is_tried_holds_up_no_other_request(folder):
    """By order of events: while four schemas are tried, others answer, with and without schemas that are known."""
    engine = Engine(folder, num_blocks=64)
    app = ServerApp(engine, ServerConfig(), model_name="tiny", version="0")
    is_tried, may_end, order = threading.Semaphore(0), threading.Event(), []

    class Held:
        def problem(self, *_):
            is_tried.release()
            assert may_end.wait(100)

    async def ask(client, name, **fields):
        body = {"prompt": "x", "max_tokens": 3} | fields
        found = await client.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        order.append(name)

    async def both():
        app.start()
        local = httpx2.ASGITransport(app=app.asgi)
        async with httpx2.AsyncClient(transport=local, base_url="http://localhost") as client:
            await ask(client, "known", guided_json=SCHEMA)
            engine.answer_rules.trial = Held()
            held = [asyncio.ensure_future(ask(client, "held", guided_json={"const": i})) for i in range(8)]
            await asyncio.to_thread(is_tried.acquire)
            for _ in range(3):
                await ask(client, "plain")
                await ask(client, "schema", guided_json=SCHEMA)
                assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
            may_end.set()
            await asyncio.gather(*held)
        await asyncio.to_thread(app.stop)

    asyncio.run(asyncio.wait_for(both(), 110))
    assert order == ["known", *["plain", "schema"] * 3, *["held"] * 8]


def test_more_schemas_than_may_wait_are_429(folder):
    app = ServerApp(Engine(folder, num_blocks=64), ServerConfig(), model_name="tiny", version="0")
    app._num_schemas = 32

    async def ask():
        app.start()
        local = httpx2.ASGITransport(app=app.asgi)
        async with httpx2.AsyncClient(transport=local, base_url="http://localhost") as client:
            body = {"prompt": "x", "max_tokens": 3}
            found = await client.post("/v1/completions", json=body | {"guided_json": {"const": 3}})
            assert (found.status_code, found.headers["retry-after"]) == (429, "1")
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await asyncio.to_thread(app.stop)

    asyncio.run(asyncio.wait_for(ask(), 110))


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (BOMB, "multipleOf=999979"),
        ({"enum": [*range(20_000)]}, "enum: has more than"),
        ({"type": "string", "pattern": "^(a?){500}a{500}$"}, "too large to follow"),
        ({"allOf": [{"multipleOf": 99_991}, {"multipleOf": 99_989}]}, "cannot be kept"),
    ],
)
def test_bombs_are_400_in_one_sentence(server, schema, said):
    found = post(server, {"response_format": wrapped(schema)})
    message = found.json()["error"]["message"]
    assert found.status_code == 400 and said in message, message
    assert "<state>" not in message and "compute_time" not in message


WRAPPED = {"type": "integer", "minimum": 1, "maximum": 999_999}
WRAPPED["allOf"] = [
    {"multipleOf": 53_300},
    {"multipleOf": 80_581},
]  # beyond 32 bits: the compiler is wrong


def test_an_answer_that_would_not_validate_is_400(server):
    fields = {"guided_json": {"type": "array", "items": WRAPPED, "minItems": 1}, "seed": 0}
    fields |= {"max_tokens": 100, "n": 4}
    found = post(server, fields)
    assert found.status_code == 400 and "does not validate" in found.text
    found = post(server, fields | {"stream": True})
    assert "invalid_request_error" in found.text and '"stop"' not in found.text
