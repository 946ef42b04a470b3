"""Requests of Anthropic's /v1/messages, translated into chat completions."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import refuse_unknown
from expertmesh.serve.schema import NULL_ALONE, Positive, RequestObject, Stops, Text, few, one_of
from expertmesh.serve.translation import Refused, TranslatedRequest, passed, without_nulls

_REFUSED: Refused = {
    "container": ((), "there are no containers"),
    "mcp_servers": (([],), "there is no client of MCP; call its tools yourself"),
    "context_management": (({"edits": []},), "conversations are not shortened; send less"),
    "stop": ((), "its name here is stop_sequences"),
    "max_completion_tokens": ((), "its name here is max_tokens"),
    "response_format": ((), "it is output_config.format here"),
    "output_format": ((), "it is output_config.format here"),
}
"""Fields that are refused but for these values, and why."""
_BLOCKS = ("text", "thinking", "tool_use", "tool_result")
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"type": "string"},
    },
    "required": ["role", "content"],
    **NULL_ALONE,
}


class TextOfMessage(RequestObject):
    """Text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(RequestObject):
    """Reasoning of an earlier answer; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


class ToolUseBlock(RequestObject):
    """Call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_Texts = Annotated[
    list[Annotated[TextOfMessage, one_of(["text"], "only text is")]],
    Field(fail_fast=True),
    BeforeValidator(few),
]


class ToolResultBlock(RequestObject):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | _Texts | None = None
    is_error: bool | None = None


_Block = Annotated[TextOfMessage | ThinkingBlock | ToolUseBlock | ToolResultBlock, one_of(_BLOCKS, "only text is")]


class TurnOfMessages(RequestObject):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[_Block], Field(fail_fast=True, min_length=1), BeforeValidator(few)]


class CustomTool(RequestObject):
    """Tool that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ChoiceOfTools(RequestObject):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(RequestObject):
    """Whether the model thinks first; a budget is bounded by max_tokens alone."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(RequestObject):
    """Effort, and the form of the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(RequestObject):
    """Request of /v1/messages/count_tokens, with the fields of a message's request, whose options count nothing."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    messages: Annotated[
        list[Annotated[TurnOfMessages, WithJsonSchema(_MESSAGE)]],
        Field(fail_fast=True, min_length=1),
        BeforeValidator(few),
    ]
    system: SkipJsonSchema[Text | _Texts | None] = None
    tools: SkipJsonSchema[
        list[Annotated[CustomTool, one_of(["custom"], "only tools of your own are", "custom")]] | None
    ] = None
    tool_choice: SkipJsonSchema[ChoiceOfTools | None] = None
    thinking: SkipJsonSchema[ThinkingConfig | None] = None
    output_config: SkipJsonSchema[OutputConfig | None] = None
    max_tokens: Positive | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


class MessagesRequest(CountTokensRequest):
    """Request of /v1/messages."""

    max_tokens: Positive


_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details by which clients know to send the conversation instead."""


def translated(request: CountTokensRequest) -> TranslatedRequest:
    """The request as a chat completion."""
    if (request.model_extra or {}).get("thread") is not None:
        why = "thread: conversations are not kept here; send all messages"
        raise RequestError(400, why, param="thread", details=_NO_THREADS)
    messages, origins = _messages(request)
    body = passed(request.model_extra, _REFUSED) | without_nulls(
        model=request.model,
        messages=messages,
        tools=_tools(request.tools or ()) or None,
        **_of_choice(request.tool_choice),
        **_of_output(request.output_config),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or None,
        temperature=request.temperature,
        top_p=request.top_p,
    )
    if messages[-1]["role"] == "assistant":  # the answer goes on where it ends
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.thinking is not None:
        refuse_unknown(request.thinking.model_extra, place="thinking.")
        if request.thinking.type in ("enabled", "disabled"):
            thinks = request.thinking.type == "enabled"
            variables = {"enable_thinking": thinks, "thinking": thinks}
            body["chat_template_kwargs"] = variables | (body.get("chat_template_kwargs") or {})
    places = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "continue_final_message": "messages",
        "messages": "messages",
    }
    return TranslatedRequest(body, origins, places)


def _messages(request: CountTokensRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages of a conversation, and the place of each: results of calls are messages of their own."""
    found: list[dict[str, Any]] = []
    places: list[str] = []
    if request.system is not None:
        found.append({"role": "system", "content": _text("system", request.system, "\n")})
        places.append("system")
    for i, message in enumerate(request.messages):
        place = f"messages.{i}"
        refuse_unknown(message.model_extra, place=f"{place}.")
        blocks = message.content
        if message.role == "system":
            text = _text(f"{place}.content", blocks, "\n")
            if found and found[-1]["role"] == "system":  # templates know one
                found[-1]["content"] += "\n\n" + text
                continue
            said = [{"role": "system", "content": text}]
        elif isinstance(blocks, str):
            said = [{"role": message.role, "content": blocks}]
        else:
            for j, block in enumerate(blocks):
                refuse_unknown(block.model_extra, place=f"{place}.content.{j}.")
            said = _of_user(place, blocks) if message.role == "user" else [_of_model(place, blocks)]
        found += said
        places += [place] * len(said)
    return found, places


def _of_user(place: str, blocks: Iterable[Any]) -> list[dict[str, Any]]:
    """Results and texts of a user in their order."""
    found: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        where = f"{place}.content.{i}"
        if isinstance(block, ToolResultBlock):
            text = _text(f"{where}.content", block.content or "", "")
            error = {"is_error": True} if block.is_error else {}
            tool = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
            found.append(tool | error)
        elif not isinstance(block, TextOfMessage):
            raise RequestError(400, f"{where}: {block.type} is the model's", param=where)
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += "\n" + block.text
        else:
            found.append({"role": "user", "content": block.text})
    return found


def _of_model(place: str, blocks: Iterable[Any]) -> dict[str, Any]:
    """A message of the model."""
    said: dict[str, Any] = {"role": "assistant"}
    for i, block in enumerate(blocks):
        if isinstance(block, TextOfMessage):
            said["content"] = said.get("content", "") + block.text
        elif isinstance(block, ThinkingBlock):
            said["reasoning_content"] = said.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            call = {"id": block.id, "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        else:
            where = f"{place}.content.{i}"
            raise RequestError(400, f"{where}: {block.type} is the user's", param=where)
    if "tool_calls" not in said:
        said.setdefault("content", "")
    return said


def _text(place: str, content: str | Sequence[Any], between: str) -> str:
    """Joined text of blocks; raises RequestError if one is no text."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        where = f"{place}.{i}"
        if not isinstance(block, TextOfMessage):
            raise RequestError(400, f"{where}: {block.type} is no text", param=where)
        refuse_unknown(block.model_extra, place=f"{where}.")
        texts.append(block.text)
    return between.join(texts)


def _tools(tools: Iterable[CustomTool]) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(tools):
        known = ("input_examples", "eager_input_streaming", "strict")
        refuse_unknown(tool.model_extra, place=f"tools.{i}.", known=known)
        strict = (tool.model_extra or {}).get("strict")
        function = without_nulls(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=strict,
        )
        found.append({"type": "function", "function": function})
    return found


def _of_choice(choice: ChoiceOfTools | None) -> dict[str, Any]:
    if choice is None:
        return {}
    refuse_unknown(choice.model_extra, place="tool_choice.")
    if (choice.type == "tool") != (choice.name is not None):
        rule = "is needed with type tool, and with no other"
        raise RequestError(400, f"tool_choice.name: {rule}", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    known = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    parallel = False if choice.disable_parallel_tool_use else None
    return without_nulls(tool_choice=known[choice.type], parallel_tool_calls=parallel)


def _of_output(output: OutputConfig | None) -> dict[str, Any]:
    if output is None:
        return {}
    refuse_unknown(output.model_extra, place="output_config.")
    return without_nulls(response_format=output.format, reasoning_effort=output.effort)
