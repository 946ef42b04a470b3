"""LangChain's chat model and agents of LangGraph."""

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
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI


def model(**options):
    return ChatOpenAI(
        model=MODEL,
        base_url=BASE_URL,
        api_key=KEY,
        temperature=0,
        max_retries=0,
        timeout=60,
        **options,
    )


def agent(tool, prompt=None, **options):
    tools = [StructuredTool.from_function(tool.__call__, name="get_weather", description="Weather of a city.")]
    return create_agent(model(**options), tools=tools, system_prompt=prompt)


def text():
    is_greeting(model().invoke(HELLO).content)


def stream():
    is_greeting_in_pieces(chunk.content for chunk in model().stream(HELLO))


def structured():
    is_weather(model().with_structured_output(Weather).invoke(AS_JSON))


def structured_by_call():
    is_weather(model().with_structured_output(Weather, method="function_calling").invoke(AS_JSON))


def asked(question=QUESTION):
    return {"messages": [{"role": "user", "content": question}]}


def tool():
    called = Tool()
    found = agent(called, "You are a helpful assistant.").invoke(asked())
    is_round(called, found["messages"][-1].content)


def tool_streamed():
    called, pieces = Tool(), []
    for message, about in agent(called).stream(asked(), stream_mode="messages"):
        if about["langgraph_node"] == "model" and message.content:
            pieces.append(message.content)
    assert len(pieces) > 1, pieces
    is_round(called, "".join(pieces))


def agent_structured():
    found = create_agent(model(), tools=[], response_format=Weather).invoke(asked(AS_JSON))
    is_weather(found["structured_response"])


def responses_tool():
    called = Tool()
    found = agent(called, use_responses_api=True).invoke(asked())
    is_round(called, found["messages"][-1].text)


run(
    text=text,
    stream=stream,
    structured=structured,
    structured_by_call=structured_by_call,
    tool=tool,
    tool_streamed=tool_streamed,
    agent_structured=agent_structured,
    responses_tool=responses_tool,
)
