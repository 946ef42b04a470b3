"""Fields that a server does not know: refused by name wherever they stand, but for those that change no answer."""

import pytest

from expertmesh.config.server import ServerConfig
from expertmesh.engine.chat import conversation_ids
from expertmesh.engine.engine import Engine
from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import RequestReader
from expertmesh.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
)

SAID = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def reader(folder):
    return RequestReader(Engine(folder, num_blocks=64), ServerConfig(), "tiny")


def reads(reader):
    """Every path: what reads a body, its model, and the smallest body."""
    return {
        "completions": (reader.completion, CompletionRequest, {"prompt": "x"}),
        "chat": (reader.chat, ChatRequest, {"messages": SAID}),
        "tokenize": (reader.tokenize, TokenizeText, {"prompt": "x"}),
        "tokenize chat": (reader.tokenize, TokenizeChat, {"messages": SAID}),
        "detokenize": (reader.detokenize, DetokenizeRequest, {"tokens": [5]}),
    }


OF_OTHERS = {
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "bad_words_ids": [[97]],
    "eos_token_id": 97,
    "stop_strings": ["a"],
    "repeat_last_n": 64,
    "epsilon_cutoff": 3.0,
    "penalty_alpha": 0.6,
    "smoothing_factor": 0.5,
    "nsigma": 1.0,
    "dry_multiplier": 0.8,
    "lora_path": "x",
    "never_heard_of": {"a": 1},
}


@pytest.mark.parametrize("path", ["completions", "chat", "tokenize", "tokenize chat", "detokenize"])
def test_an_unknown_field_is_refused_by_name_on_every_path(reader, path):
    read, kind, body = reads(reader)[path]
    plain = read(kind.model_validate(body))
    for name, value in OF_OTHERS.items():
        with pytest.raises(RequestError, match=f"^{name}: ") as caught:
            read(kind.model_validate({**body, name: value}))
        assert (caught.value.status, caught.value.param) == (400, name)
        assert read(kind.model_validate({**body, name: None})) == plain
    harmless = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "request_id": "7",
        "prediction": {"type": "content", "content": "a"},
    }
    assert read(kind.model_validate(body | harmless)) == plain


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stream_options": {"include_usage": True, "more": 1}}, "stream_options.more"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}]},
         "messages.0.content.0.more"),
        ({"prompt": "x"}, "prompt"),
    ],
)  # fmt: skip
def test_fields_within_fields_are_looked_at(reader, fields, name):
    with pytest.raises(RequestError, match=f"^{name}: ") as caught:
        reader.chat(ChatRequest.model_validate({"messages": SAID} | fields))
    assert (caught.value.status, caught.value.param) == (400, name)


def test_fields_within_fields_that_change_nothing_are_taken(reader):
    part = {
        "type": "text",
        "text": "hi",
        "cache_control": {"type": "ephemeral"},
        "more": None,
        "annotations": [],
        "prompt_cache_breakpoint": {"mode": "explicit"},
    }
    body = {
        "messages": [{"role": "user", "content": [part]}],
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    plain = reader.chat(ChatRequest.model_validate({"messages": SAID}))
    assert reader.chat(ChatRequest.model_validate(body)) == plain


@pytest.mark.parametrize(
    "part",
    [{"type": "input_text", "text": "hi"}, {"type": "output_text", "text": "hi"}, {"type": "refusal", "refusal": "hi"}],
)
def test_texts_of_other_names_are_texts(reader, part):
    said = {"role": "assistant", "content": "hi"}
    plain = reader.chat(ChatRequest.model_validate({"messages": [*SAID, said]}))
    asked = {"messages": [*SAID, {"role": "assistant", "content": [part]}]}
    assert reader.chat(ChatRequest.model_validate(asked)) == plain
    assert reader.text is not None and plain.prompts == [conversation_ids(reader.text, asked["messages"])]


def format_of(kind, **more):
    return {"response_format": {"type": kind, **more}}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KEPT = {
    "object": (format_of("json_object"), OBJECT),
    "object with a schema": (format_of("json_object", schema=SCHEMA), SCHEMA),
    "its text": (format_of("json_object", schema='{"type": "null"}'), {"type": "null"}),
    "schema beside the type": (format_of("json_schema", schema=SCHEMA), SCHEMA),
    "null": (format_of("json_object", schema=None, json_schema=None), OBJECT),
    "OpenAI": (
        format_of("json_schema", json_schema={"name": "x", "strict": False, "schema": SCHEMA, "description": "d"}),
        SCHEMA,
    ),
    "text": (format_of("text", schema=None), None),
    "vLLM": ({"structured_outputs": {"json": SCHEMA, "json_object": False, "regex": None}}, SCHEMA),
    "vLLM's switches": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False, "whitespace_pattern": None}}, SCHEMA),  # noqa: E501
    "vLLM's object": ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, OBJECT),
    "vLLM's list": ({"guided_choice": ["a", "b"]}, ("choice", ("a", "b"))),
    "vLLM's texts": ({"structured_outputs": {"choice": ["a"]}}, ("choice", ("a",))),
    "vLLM's expression": ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    "vLLM's grammar": ({"guided_grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    "SGLang": ({"regex": "a+", "ebnf": ""}, ("regex", "a+")),
    "SGLang's grammar": ({"ebnf": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    "llama.cpp": ({"grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
    "Together": (format_of("regex", pattern="a+"), ("regex", "a+")),
    "TGI": (format_of("regex", value="a+"), ("regex", "a+")),
    "TGI's JSON": (format_of("json", value=SCHEMA), SCHEMA),
    "Fireworks": (format_of("grammar", grammar='root ::= "a"'), ("grammar", 'root ::= "a"')),
    "nothing": ({"structured_outputs": {}}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_schema_is_kept_in_every_spelling(reader, name):
    fields, schema = KEPT[name]
    job = reader.completion(CompletionRequest.model_validate({"prompt": "x"} | fields))
    assert job.params[0].guide == (schema if isinstance(schema, tuple | None) else ("json_schema", schema))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (format_of("json_object", strict=True), "strict is not supported"),
        (format_of("json_object", json_schema={"schema": SCHEMA}), "json_schema is not supported"),
        (format_of("text", schema=SCHEMA), "schema is not supported"),
        (format_of("json_schema", schema=SCHEMA, json_schema={"schema": SCHEMA}), "beside"),
        (format_of("json_schema", json_schema={"schema": SCHEMA, "whitespace": "x"}),
         "response_format.json_schema: whitespace"),
        (format_of("json_object", schema=True), "allows all JSON"),
        (format_of(["text"]), "must be an object with type"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
         "disable_additional_properties"),
        ({"structured_outputs": {"json_object": 2}}, "true or false"),
        ({"structured_outputs": {"json": SCHEMA, "json_object": True}}, "beside"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "choice is given beside regex"),
        ({"structured_outputs": {"choice": "a"}}, "must be a list of texts"),
        ({"guided_regex": "a", "ebnf": "root ::= [a]"}, "beside guided_regex"),
        (format_of("regex", grammar="a"), "grammar is not supported there; it has type, pattern"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_nothing_beside_a_schema_is_passed_over(reader, fields, said):
    with pytest.raises(RequestError, match=said) as caught:
        reader.completion(CompletionRequest.model_validate({"prompt": "x"} | fields))
    assert caught.value.status == 400 and caught.value.param in fields
