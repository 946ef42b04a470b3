"""OpenAI's /v1/responses: the client's own types, streams, conversations, and what is refused."""

import json

import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from expertmesh.config.sampling import SamplingParams
from expertmesh.config.server import ServerConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.output import RequestOutput
from expertmesh.serve.faults import RequestError
from expertmesh.serve.openai_responses import ResponsesRequest, translated
from expertmesh.serve.openai_writing import ResponsesWriter
from expertmesh.serve.reading import Job, RequestReader
from expertmesh.text.answer_pieces import CallArguments, CallStart, Content, Thought

EVENTS = TypeAdapter(ResponseStreamEvent)
ASKED = {"model": "tiny", "input": "def main(", "max_output_tokens": 6, "temperature": 0}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"], "additionalProperties": False},  # noqa: E501
    "strict": True,
}  # fmt: skip


def strict(value, kind=Response):
    """A value whose fields have the types that the client declares for them."""
    return TypeAdapter(kind).validate_json(json.dumps(value))


def test_an_answer_is_that_of_a_chat_completion(client, server):
    whole = client.responses.create(**ASKED, instructions="Be brief", metadata={"a": "b"})
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "def main("}],
        max_tokens=6,
        temperature=0,
    )  # fmt: skip
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.store if hasattr(whole, "store") else False) is False
    assert whole.metadata == {"a": "b"} and whole.usage.output_tokens == 6
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    raw = httpx2.post(f"{server.address}/v1/responses", json=ASKED).json()
    strict(raw)


def test_a_stream_has_the_events_of_the_types_in_order(client, server):
    whole = client.responses.create(**ASKED)
    with httpx2.stream("POST", f"{server.address}/v1/responses", json=ASKED | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    values = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert names == [one["type"] for one in values] and "[DONE]" not in lines[-1]
    assert [one["sequence_number"] for one in values] == [*range(len(values))]
    for value in values:
        EVENTS.validate_json(json.dumps(value))
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    said = "".join(one["delta"] for one in values if one["type"] == "response.output_text.delta")
    assert said == whole.output_text == values[-4]["text"]
    events = [*client.responses.create(**ASKED, stream=True)]
    assert events[-1].response.output_text == said
    short = {"guided_choice": ["yes", "no"]}
    with client.responses.stream(**ASKED, extra_body=short) as stream:
        assert stream.get_final_response().output_text in ("yes", "no")


def test_calls_and_parsed_answers(client):
    asked = ASKED | {"max_output_tokens": 300, "temperature": 1, "extra_body": {"seed": 1}}
    found = client.responses.create(**asked, tools=[WEATHER], tool_choice="required")
    (call,) = [one for one in found.output if one.type == "function_call"][:1]
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Bern", "Oslo")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [{"role": "user", "content": "a"}, call.model_dump(exclude_none=True), output]
    with pytest.raises(openai.BadRequestError, match="input: have calls of tools, and the model's"):
        client.responses.create(**asked | {"input": history}, tools=[WEATHER], tool_choice="none")
    events = [*client.responses.create(**asked, tools=[WEATHER], tool_choice="required", stream=True)]
    kinds = [one.type for one in events]
    assert "response.function_call_arguments.delta" in kinds
    done = next(one for one in events if one.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments

    class Answer(BaseModel):
        yes: bool

    parsed = client.responses.parse(**asked, text_format=Answer)
    assert parsed.output_parsed in (Answer(yes=True), Answer(yes=False))
    formed = client.responses.create(**asked, text={"format": {"type": "json_object"}})
    assert formed.text.format.type == "json_object"


class Scripted:
    """A parser whose pieces are given, one list for each output."""

    def __init__(self, *pieces):
        self.pieces = iter(pieces)

    def feed(self, _):
        return next(self.pieces, [])

    def finish(self):
        return []


SCRIPT = (
    [Thought("I ")],
    [Thought("think"), Content("Yes")],
    [Content(", sir")],
    [CallStart(0, "call_1", "weather"), CallArguments(0, '{"ci')],
    [CallArguments(0, 'ty": "Bern"}'), CallStart(1, "call_2", "stop"), CallArguments(1, "{}")],
)


def outputs(count):
    return [
        RequestOutput("a", 0, (1, 2), tuple(range(i)), "x" * i, "stop" if i == count else None)
        for i in range(1, count + 1)
    ]


def scripted():
    """A job whose answers are parsed into `SCRIPT`."""
    return Job([[1, 2]], [], [SamplingParams()], make_parser=lambda: Scripted(*SCRIPT))


def test_thoughts_texts_and_calls_are_items_of_their_types():
    request = ResponsesRequest.model_validate(ASKED | {"tools": [WEATHER]})
    writer = ResponsesWriter(scripted(), "tiny", request)
    events = [one for output in outputs(5) for one in writer.chunks(0, output)]
    for event in events:
        EVENTS.validate_json(json.dumps(event))
    last = events[-1]
    assert last["type"] == "response.completed"
    response = strict(last["response"])
    assert [one.type for one in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output[0].content[0].text == "I think"
    assert response.output_text == "Yes, sir"
    assert response.output[2].arguments == '{"city": "Bern"}'
    assert {one.status for one in response.output} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens == 1
    opened = [one["output_index"] for one in events if one["type"] == "response.output_item.added"]
    closed = [one["output_index"] for one in events if one["type"] == "response.output_item.done"]
    assert opened == closed == [0, 1, 2, 3]
    whole = ResponsesWriter(scripted(), "tiny", request)
    for output in outputs(5)[:-1]:
        whole.chunks(0, output)
    body = whole.whole({0: outputs(5)[-1]})
    assert [one["type"] for one in body["output"]] == [one.type for one in response.output]
    failed = writer.failed(RequestError(500, "broken"))
    assert EVENTS.validate_json(json.dumps(failed[0])).response.error.message == "broken"


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "d"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "e", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "h"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "i"}]},
        {"type": "function_call_output", "call_id": None, "name": "g", "output": "l", "caller": {"type": "direct"}},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "j"}]},
        {"role": "user", "content": "k"},
    ]  # fmt: skip
    asked = translated(ResponsesRequest.model_validate({"input": items, "instructions": "a"}))

    def call(name, number):
        return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert asked.body["messages"] == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "reasoning_content": "d", "content": "e", "tool_calls": [call("f", "1"), call("g", "2")]},
        {"role": "tool", "tool_call_id": "1", "content": "h"},
        {"role": "tool", "tool_call_id": "2", "content": "i"},
        {"role": "tool", "name": "g", "content": "l"},
        {"role": "assistant", "content": "j"},
        {"role": "user", "content": "k"},
    ]  # fmt: skip
    assert asked.origins[2] == "input.2" and asked.origins[0] == "instructions"


NAMED = {"type": "function", "name": "weather"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
PASSES = [
    {"store": False},
    {"reasoning": {"effort": None, "context": "auto", "mode": "standard"}},
    {
        "tools": [
            WEATHER
            | {
                "defer_loading": False,
                "allowed_callers": ["direct"],
                "output_schema": {},
                "async": False,
            }
        ],
        "tool_choice": "none",
    },
    {
        "input": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "a",
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    }
                ],
            }
        ]
    },
    {"include": ["reasoning.encrypted_content"]},
    {"truncation": "disabled", "background": False, "previous_response_id": None},
    {"user": "a", "safety_identifier": "b", "prompt_cache_key": "c", "service_tier": "auto"},
    {"reasoning": {"effort": None, "summary": "auto"}, "text": {"verbosity": "medium"}},
    {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto"},
    {"stream_options": {"include_obfuscation": False}, "max_tool_calls": 3},
    {"text": {"format": {"type": "text"}}, "top_logprobs": 0},
    {"seed": 3, "top_k": 4, "stop": ["a"]},
    {"guided_choice": ["yes", "no"]},
]
REFUSED = [
    ({"store": True}, "store", "not kept"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
    ({"conversation": "a"}, "conversation", "whole conversation"),
    ({"background": True}, "background", "use stream"),
    ({"truncation": "auto"}, "truncation", "not shortened"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search' is not served"),
    ({"tools": [{"type": "function", "name": "a", "defer": 1}]}, "tools.0.defer", "no field"),
    ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice.function.name", "none of the tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "only functions"),
    ({"tools": [WEATHER], "tool_choice": ALLOWED | {"tools": [NAMED | {"name": "b"}]}}, "tool_choice.allowed_tools.tools.0.function.name", "none of the tools"),  # noqa: E501
    ({"tools": [WEATHER], "tool_choice": ALLOWED | {"mode": "none"}}, "tool_choice", "auto"),
    ({"tools": [WEATHER], "tool_choice": ALLOWED | {"tools": [NAMED | {"more": 1}]}}, "tool_choice.tools.0.more", "no field"),  # noqa: E501
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", "'item_reference' is not"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input.0.content.0.type", "only text"),  # noqa: E501
    ({"input": [{"role": "user", "content": "a", "more": 1}]}, "input.0.more", "no field"),
    ({"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "summary": [], "encrypted_content": "a"}]}, "input.1.encrypted_content", "another server"),  # noqa: E501
    ({"input": []}, "input", "at least 1"),
    ({"input": 3}, "input", "Input should be"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "with type text"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nope"}}}}, "text.format", "cannot be kept"),  # noqa: E501
    ({"text": {"more": 1}}, "text.more", "no field"),
    ({"include": ["message.output_text.logprobs"]}, "include", "has logprobs"),
    ({"top_logprobs": 3}, "top_logprobs", "has logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"messages": []}, "messages", "is input"),
    ({"n": 2}, "n", "no field"),
    ({"mirostat": 2}, "mirostat", "no field"),
    ({"temperature": "hot"}, "temperature", "Input should be"),
    ({"seed": "x"}, "seed", "Input should be"),
    ({"model": "other"}, "model", "there is no 'other'"),
]  # fmt: skip


def test_what_clients_send_by_default_passes_and_the_rest_is_refused_by_name(server):
    for fields in PASSES:
        found = httpx2.post(f"{server.address}/v1/responses", json=ASKED | fields, timeout=60)
        assert found.status_code == 200, (fields, found.text)
    for fields, param, said in REFUSED:
        found = httpx2.post(f"{server.address}/v1/responses", json=ASKED | fields, timeout=60)
        assert found.status_code in (400, 404), (fields, found.text)
        error = found.json()["error"]
        assert error["param"] == param and said in error["message"], (fields, error)
        assert "\n" not in error["message"] and error["message"].startswith(param)
    for method in ("GET", "DELETE"):
        gone = httpx2.request(method, f"{server.address}/v1/responses/resp_1")
        assert gone.status_code == 404 and "nothing is kept" in gone.text


def test_allowed_tools_and_input_tokens(client):
    asked = ASKED | {"max_output_tokens": 300, "temperature": 1, "extra_body": {"seed": 1}}
    other = WEATHER | {"name": "stop"}
    found = client.responses.create(**asked, tools=[other, WEATHER], tool_choice=ALLOWED)
    assert {one.name for one in found.output if one.type == "function_call"} == {"weather"}
    strict(json.loads(found.model_dump_json()))
    fields = {"input": "def main(", "instructions": "Be brief", "model": "tiny"}
    counted = client.responses.input_tokens.count(**fields)
    whole = client.responses.create(**fields, max_output_tokens=1)
    assert (counted.object, counted.input_tokens) == (
        "response.input_tokens",
        whole.usage.input_tokens,
    )


def test_errors_of_the_reader_have_the_names_of_the_request(folder):
    asked = translated(
        ResponsesRequest.model_validate({"input": [{"role": "user", "content": "a"}], "instructions": "b"})
    )  # fmt: skip
    fault = RequestError(400, "messages.1.content: is wrong", param="messages.1.content")
    own = asked.own(fault)
    assert (str(own), own.param) == ("input.0.content: is wrong", "input.0.content")
    own = asked.own(RequestError(400, "messages: too long", param="messages"))
    assert (str(own), own.param) == ("input: too long", "input")
    reader = RequestReader(Engine(folder, num_blocks=64), ServerConfig(), "tiny")
    long = translated(ResponsesRequest.model_validate({"input": "a" * 2**20}))
    with pytest.raises(RequestError) as caught:
        reader.chat(long.chat())
    assert long.own(caught.value).param == "input"
