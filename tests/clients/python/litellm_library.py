"""LiteLLM as a library."""

import json

import litellm
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

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def said(text):
    return [{"role": "user", "content": text}]


def ask(messages, provider="openai", **options):
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        messages=messages,
        api_base=BASE_URL,
        api_key=KEY,
        temperature=0,
        num_retries=0,
        timeout=60,
        **options,
    )


def text():
    is_greeting(ask(said(HELLO)).choices[0].message.content)


def stream():
    is_greeting_in_pieces(c.choices[0].delta.content for c in ask(said(HELLO), stream=True))


def structured():
    found = ask(said(AS_JSON), response_format=Weather)
    is_weather(Weather.model_validate_json(found.choices[0].message.content))


def rounds(**options):
    tool, messages = Tool(), said(QUESTION)
    message = ask(messages, tools=TOOLS, **options).choices[0].message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        result = tool(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = ask(messages, tools=TOOLS, **options)
    is_round(tool, last.choices[0].message.content)


def responses_text():
    found = litellm.responses(model=f"openai/{MODEL}", input=HELLO, api_base=BASE_URL, api_key=KEY, temperature=0)
    is_greeting(found.output[-1].content[0].text)


run(
    text=text,
    stream=stream,
    structured=structured,
    tool=rounds,
    tool_as_vllm=lambda: rounds(provider="hosted_vllm"),
    responses_text=responses_text,
)
