"""The openai library of Python: chat completions and responses."""

import json

import openai
from case import (
    AS_JSON,
    BASE_URL,
    HELLO,
    KEY,
    MODEL,
    QUESTION,
    Tool,
    Weather,
    is_greeting,
    is_greeting_in_pieces,
    is_round,
    is_weather,
    run,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ABOUT = {"name": "get_weather", "description": "Weather of a city, now.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": ABOUT}]
FLAT_TOOLS = [{"type": "function", "strict": True, **ABOUT}]


def said(text):
    return [{"role": "user", "content": text}]


def ask(text, **options):
    return client.chat.completions.create(model=MODEL, messages=said(text), temperature=0, **options)


def text():
    is_greeting(ask(HELLO).choices[0].message.content)


def stream():
    chunks = list(ask(HELLO, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0
    is_greeting_in_pieces(c.choices[0].delta.content for c in chunks if c.choices)


def structured():
    found = client.chat.completions.parse(model=MODEL, messages=said(AS_JSON), response_format=Weather, temperature=0)
    is_weather(found.choices[0].message.parsed)


def rounds(first):
    """A round of the tool, whose first answer a function gives as (message, finish_reason)."""
    tool, messages = Tool(), said(QUESTION)
    message, reason = first(messages)
    assert reason == "tool_calls", reason
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        result = tool(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
    is_round(tool, last.choices[0].message.content)


def create(**options):
    def first(messages):
        choice = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, temperature=0, **options
        ).choices[0]
        return choice.message, choice.finish_reason

    return first


def streamed(messages):
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS, temperature=0) as events:
        choice = events.get_final_completion().choices[0]
    return choice.message, choice.finish_reason


def named(messages):
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    message, reason = create(tool_choice=chosen)(messages)
    assert reason in ("stop", "tool_calls"), reason  # OpenAI says stop where a function is named
    return message, "tool_calls"


def respond(given, **options):
    return client.responses.create(model=MODEL, input=given, temperature=0, **options)


def responses_text():
    is_greeting(respond(HELLO).output_text)


def responses_stream():
    events = list(respond(HELLO, stream=True))
    assert events[-1].type == "response.completed", events[-1].type
    is_greeting_in_pieces(e.delta for e in events if e.type == "response.output_text.delta")


def responses_structured():
    found = client.responses.parse(model=MODEL, input=AS_JSON, text_format=Weather, temperature=0)
    is_weather(found.output_parsed)


def responses_round():
    tool, given = Tool(), said(QUESTION)
    first = respond(given, tools=FLAT_TOOLS)
    given += [item.model_dump(exclude_none=True) for item in first.output]
    for item in first.output:
        if item.type == "function_call":
            result = tool(**json.loads(item.arguments))
            given.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    is_round(tool, respond(given, tools=FLAT_TOOLS).output_text)


run(
    text=text,
    stream=stream,
    structured=structured,
    tool=lambda: rounds(create()),
    tool_streamed=lambda: rounds(streamed),
    tool_required=lambda: rounds(create(tool_choice="required")),
    tool_named=lambda: rounds(named),
    responses_text=responses_text,
    responses_stream=responses_stream,
    responses_structured=responses_structured,
    responses_tool=responses_round,
)
