"""Agents of pydantic-ai, over chat completions and over responses."""

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
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(kind=OpenAIChatModel, tool=None, **options):
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    found = Agent(model, model_settings={"temperature": 0, "timeout": 60}, retries=0, **options)
    if tool is not None:
        found.tool_plain(tool.__call__, name="get_weather")
    return found


async def text():
    is_greeting((await agent(instructions="Be polite.").run(HELLO)).output)


async def stream():
    async with agent().run_stream(HELLO) as answer:
        is_greeting_in_pieces([piece async for piece in answer.stream_text(delta=True, debounce_by=None)])


async def structured():
    """The default way: the form is a tool that must be called."""
    is_weather((await agent(output_type=Weather).run(AS_JSON)).output)


async def structured_natively():
    is_weather((await agent(output_type=NativeOutput(Weather)).run(AS_JSON)).output)


async def tool(kind=OpenAIChatModel):
    called = Tool()
    found = await agent(kind, called, system_prompt="You are a helpful assistant.").run(QUESTION)
    is_round(called, found.output)


async def tool_then_structured():
    called = Tool()
    found = (await agent(tool=called, output_type=Weather).run(QUESTION)).output
    assert called.cities in ([], ["Paris"]), called.cities
    assert isinstance(found, Weather), found


run(
    text=text,
    stream=stream,
    structured=structured,
    structured_natively=structured_natively,
    tool=tool,
    tool_then_structured=tool_then_structured,
    responses_tool=lambda: tool(OpenAIResponsesModel),
)
