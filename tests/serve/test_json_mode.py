"""JSON mode over HTTP: OpenAI's and vLLM's spellings, streams, and schemas that cannot be kept."""

import json
import sys
from functools import reduce

import httpx2
import jsonschema
import pytest

from expertmesh.config.server import ServerConfig
from expertmesh.engine.engine import Engine
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
    return httpx2.post(server.address + path, json=body, timeout=120)


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
        ("structured_outputs", {"regex": "a*"}),
        ("structured_outputs", {"json": {"pattern": "(", "type": "string"}}),
        ("guided_regex", "a*"),
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
