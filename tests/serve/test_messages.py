"""Anthropic's /v1/messages: blocks, streams, calls, counts of tokens, and errors in its own shape."""

import json

import httpx2
import pytest
from tests.serve.test_responses import outputs, scripted

from expertmesh.serve.anthropic_messages import CountTokensRequest, MessagesRequest, translated
from expertmesh.serve.anthropic_writing import MessagesWriter
from expertmesh.serve.faults import RequestError

SAID = [{"role": "user", "content": "def main("}]
ASKED = {"model": "tiny", "max_tokens": 6, "messages": SAID, "temperature": 0}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"], "additionalProperties": False},  # noqa: E501
}  # fmt: skip


def post(server, path="messages", **fields):
    head = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    return httpx2.post(f"{server.address}/v1/{path}", json=ASKED | fields, headers=head, timeout=60)


def events_of(text):
    """Names and values of a stream's events."""
    blocks = [one.split("\n") for one in text.strip().split("\n\n")]
    names = [one[0].removeprefix("event: ") for one in blocks]
    values = [json.loads(one[1].removeprefix("data: ")) for one in blocks]
    assert names == [one["type"] for one in values]
    return values


def test_an_answer_is_that_of_a_chat_completion(server):
    found = post(
        server,
        system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    )
    body = {
        "messages": [{"role": "system", "content": "Be brief"}, *SAID],
        "max_tokens": 6,
        "temperature": 0,
    }
    chat = httpx2.post(f"{server.address}/v1/chat/completions", json=body).json()
    answer = found.json()
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    used = answer["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = post(server, "messages/count_tokens", system="Be brief", max_tokens=None, temperature=None)
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    same = post(server, "messages/count_tokens", system="Be brief", stream=True, top_p=0.5)
    assert same.json() == counted.json()
    told = [{"role": "system", "content": "Be"}, {"role": "system", "content": "brief"}, *SAID]
    split = post(server, "messages/count_tokens", messages=told)
    one = post(server, "messages/count_tokens", system="Be\n\nbrief")
    assert split.json() == one.json()


def test_a_stream_has_the_events_in_order(server):
    values = events_of(post(server, stream=True).text)
    kinds = [one["type"] for one in values]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {*kinds[3:-3]} == {"content_block_delta"}
    said = "".join(one["delta"]["text"] for one in values[3:-3])
    assert said == post(server).json()["content"][0]["text"]
    assert values[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert values[-2]["usage"]["output_tokens"] == 6
    assert values[0]["message"]["content"] == []


def test_stop_sequences_are_told(server):
    text = post(server, max_tokens=40).json()["content"][0]["text"]
    stop = text[8:10]
    found = post(server, max_tokens=40, stop_sequences=["never said", stop]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]
    ended = post(server, guided_choice=["yes"]).json()
    assert (ended["stop_reason"], ended["content"][0]["text"]) == ("end_turn", "yes")


def test_calls_are_blocks(server):
    asked = {
        "tools": [WEATHER],
        "tool_choice": {"type": "any"},
        "max_tokens": 300,
        "temperature": 1,
    }
    found = post(server, **asked, seed=1).json()
    assert found["stop_reason"] == "tool_use", found
    call = next(one for one in found["content"] if one["type"] == "tool_use")
    assert call["name"] == "weather" and call["input"]["city"] in ("Bern", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    history = [
        *SAID,
        {"role": "assistant", "content": found["content"]},
        {"role": "user", "content": [result]},
    ]
    refused = post(server, **asked | {"messages": history}).json()["error"]["message"]
    assert refused.startswith("messages: have calls of tools, and the model's chat template")
    values = events_of(post(server, **asked, seed=1, stream=True).text)
    parts = [one["delta"]["partial_json"] for one in values if one.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(parts).partition("}")[0] + "}") == call["input"]


def test_thoughts_texts_and_calls_are_blocks_of_their_types():
    writer = MessagesWriter(scripted(), "tiny")
    values = [one for output in outputs(5) for one in writer.chunks(0, output)] + writer.last()
    blocks = {}
    is_open = None
    for one in values:
        if one["type"] == "content_block_start":
            assert is_open is None and one["index"] == len(blocks)
            is_open = one["index"]
            blocks[is_open] = dict(one["content_block"])
        elif one["type"] == "content_block_delta":
            assert one["index"] == is_open
            kind, value = one["delta"]["type"], [*one["delta"].values()][1]
            blocks[is_open][kind] = blocks[is_open].get(kind, "") + value
        elif one["type"] == "content_block_stop":
            assert one["index"] == is_open
            is_open = None
    assert [one["type"] for one in blocks.values()] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking_delta"] == "I think" and blocks[0]["signature_delta"] == ""
    assert blocks[1]["text_delta"] == "Yes, sir"
    assert json.loads(blocks[2]["input_json_delta"]) == {"city": "Bern"}
    assert values[-2]["delta"]["stop_reason"] == "tool_use"
    whole = MessagesWriter(scripted(), "tiny")
    for output in outputs(5)[:-1]:
        whole.chunks(0, output)
    content = whole.whole({0: outputs(5)[-1]})["content"]
    assert [one["type"] for one in content] == [one["type"] for one in blocks.values()]
    assert content[2] == {
        "type": "tool_use",
        "id": "call_1",
        "name": "weather",
        "input": {"city": "Bern"},
    }
    failed = writer.failed(RequestError(500, "broken"))
    assert failed == [{"type": "error", "error": {"type": "api_error", "message": "broken"}}]


def test_blocks_become_messages():
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "c", "signature": "x"},
            {"type": "text", "text": "d"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"é": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "e"}], "is_error": True},
            {"type": "text", "text": "g"},
        ]},
        {"role": "system", "content": [{"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "h"},
    ]  # fmt: skip
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": said, "system": "s", "tools": [WEATHER], "thinking": thinking}
    asked = translated(CountTokensRequest.model_validate(body))
    function = {"name": "f", "arguments": '{"é": 1}'}
    assert asked.body["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "c", "content": "d",
         "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "e", "is_error": True},
        {"role": "user", "content": "g"},
        {"role": "system", "content": "i"},
        {"role": "assistant", "content": "h"},
    ]  # fmt: skip
    assert asked.origins == [
        "system",
        "messages.0",
        "messages.1",
        "messages.2",
        "messages.2",
        "messages.3",
        "messages.4",
    ]
    assert asked.body["continue_final_message"] is True
    assert asked.body["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert asked.body["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]
    for choice, found in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        (
            {"type": "tool", "name": "weather"},
            {"type": "function", "function": {"name": "weather"}},
        ),
    ):
        one = MessagesRequest.model_validate(ASKED | {"tools": [WEATHER], "tool_choice": choice})
        assert translated(one).body["tool_choice"] == found


PASSES = [
    {"metadata": {"user_id": "a"}, "service_tier": "auto", "top_k": 5, "top_p": 0.9},
    {"thinking": {"type": "disabled"}, "cache_control": {"type": "ephemeral"}},
    {"thinking": {"type": "adaptive"}, "output_config": {}},
    {
        "thinking": {"type": "between_tools"},
        "diagnostics": {"previous_message_id": None},
        "user_profile_id": "a",
        "workspace_id": "b",
    },
    {"messages": [{"role": "system", "content": "a"}, *SAID], "system": "b"},
    {
        "tools": [WEATHER | {"defer_loading": False, "allowed_callers": ["direct"]}],
        "tool_choice": {"type": "none"},
    },
    {"stop_sequences": [], "tools": [], "context_management": {"edits": []}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}},
]
REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "developer", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "a"}]}, *SAID]}, "messages.0.content.0"),  # noqa: E501
    ({"output_format": {"type": "json_schema"}}, "output_format"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}]}, "messages.0.content.0"),  # noqa: E501
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}]}, "messages.0.content.0.more"),  # noqa: E501
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"stop": ["a"]}, "stop"),
    ({"mcp_servers": [{"url": "a"}]}, "mcp_servers"),
    ({"container": "a"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"mirostat": 2}, "mirostat"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"seed": "x"}, "seed"),
]  # fmt: skip


def test_what_clients_send_passes_and_the_rest_is_refused_in_anthropic_s_shape(server):
    for fields in PASSES:
        found = post(server, **fields)
        assert found.status_code == 200, (fields, found.text)
    for fields, place in REFUSED:
        found = post(server, **fields)
        body = found.json()
        assert found.status_code == 400 and body["type"] == "error", (fields, body)
        assert body["error"]["type"] == "invalid_request_error"
        details = body["error"].get("details", {})
        known = "thread_unsupported_request" if place == "thread" else None
        assert details.get("error_code") == known
        message = body["error"]["message"]
        assert message.startswith(place) and "\n" not in message, (fields, message)


@pytest.mark.parametrize(
    ("send", "status", "kind"),
    [
        ({"json": {"model": "other", "messages": SAID}}, 404, "not_found_error"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"content": b"", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"content": b"\xff", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"content": b"{}"}, 415, "invalid_request_error"),
        ({"json": {"messages": SAID}, "headers": {"host": "evil.example"}}, 403, "permission_error"),
        ({"json": {"a": "x" * 2**23}}, 413, "request_too_large"),
    ],
)  # fmt: skip
def test_errors_before_the_reader_have_anthropic_s_shape_too(server, send, status, kind):
    for path in ("messages", "messages/count_tokens"):
        more = {"json": send["json"] | {"max_tokens": 6}} if path == "messages" and "json" in send else {}
        found = httpx2.post(f"{server.address}/v1/{path}", **send | more)
        assert found.status_code == status, found.text
        assert found.json()["error"]["type"] == kind and found.json()["type"] == "error"
