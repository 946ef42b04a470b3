"""Requests of OpenAI's /v1/responses, translated into chat completions; nothing is kept between two of them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import refuse_unknown
from expertmesh.serve.schema import (
    NULL_ALONE,
    Positive,
    RefusalPart,
    RequestObject,
    StreamOptions,
    Text,
    few,
    one_of,
)
from expertmesh.serve.translation import Refused, TranslatedRequest, passed, without_nulls

_AGAIN = "nothing is kept between requests; send the whole conversation in input"
_REFUSED: Refused = {
    "store": ((False,), "answers are not kept; send false, or leave it out"),
    "previous_response_id": ((), _AGAIN),
    "conversation": ((), _AGAIN),
    "prompt": ((), "prompts are not kept; send input and instructions"),
    "background": ((False,), "answers are not kept; use stream"),
    "truncation": (("disabled",), "conversations are not shortened; send disabled, or less"),
    "top_logprobs": ((0,), "/v1/chat/completions has logprobs"),
    "context_management": (([],), "conversations are not shortened; send less"),
    "moderation": ((), "there is no moderation"),
    "messages": ((), "its name here is input"),
    "max_tokens": ((), "its name here is max_output_tokens"),
    "max_completion_tokens": ((), "its name here is max_output_tokens"),
    "response_format": ((), "it is text.format here"),
}
"""Fields that are refused but for these values, and why."""
_OF_ITEMS = ("id", "status", "phase", "logprobs")
"""Fields of items that say nothing to the model."""
_NO_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"type": "string"},
    },
    "required": ["role", "content"],
    **NULL_ALONE,
}


class TextOfItem(RequestObject):
    """Text of a message, of an output or of reasoning."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


_Parts = Annotated[
    list[Annotated[TextOfItem | RefusalPart, one_of(_TEXT_PARTS, "only text is")]],
    Field(fail_fast=True),
    BeforeValidator(few),
]


class MessageItem(RequestObject):
    """Message."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | _Parts


class CallItem(RequestObject):
    """Call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Text


class CallOutputItem(RequestObject):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    name: str | None = None
    output: Text | _Parts


class ReasoningItem(RequestObject):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: _Parts | None = None
    content: _Parts | None = None


_Item = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem,
    one_of(_ITEMS, "of OpenAI's own items", "message"),
    WithJsonSchema(_MESSAGE),
]


class FunctionTool(RequestObject):
    """Function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(RequestObject):
    """Function that the model must call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(RequestObject):
    """Functions that the model may or must call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[NamedFunction, one_of(["function"], "only functions are")]],
        Field(fail_fast=True, min_length=1),
    ]


_Choice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions,
    one_of(["function", "allowed_tools"], "only functions are"),
]


class TextField(RequestObject):
    """Form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningField(RequestObject):
    """Effort of reasoning; a summary is the reasoning itself."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(RequestObject):
    """Request of /v1/responses."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    input: Text | Annotated[list[_Item], Field(fail_fast=True, min_length=1), BeforeValidator(few)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: SkipJsonSchema[StreamOptions | None] = None
    tools: SkipJsonSchema[list[Annotated[FunctionTool, one_of(["function"], "only functions are")]] | None] = None
    tool_choice: SkipJsonSchema[_Choice | None] = None
    parallel_tool_calls: bool | None = None
    text: SkipJsonSchema[TextField | None] = None
    reasoning: SkipJsonSchema[ReasoningField | None] = None
    include: SkipJsonSchema[list[str] | None] = None
    metadata: SkipJsonSchema[dict[str, Any] | None] = None
    user: str | None = None


def translated(request: ResponsesRequest) -> TranslatedRequest:
    """The request as a chat completion."""
    if _NO_LOGPROBS in (request.include or ()):
        raise RequestError(400, "include: /v1/chat/completions has logprobs", param="include")
    if request.stream_options is not None:
        refuse_unknown(request.stream_options.model_extra, place="stream_options.")
    messages, origins = _messages(request)
    body = passed(request.model_extra, _REFUSED) | without_nulls(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=_tools(request) or None,
        tool_choice=_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        **_of_text(request.text),
        **_of_reasoning(request.reasoning),
    )
    places = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
        "reasoning_effort": "reasoning.effort",
    }
    return TranslatedRequest(body, origins, places)


def _messages(request: ResponsesRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages of a conversation, and the place of each: what one turn of the model has said is one message."""
    found: list[dict[str, Any]] = []
    places: list[str] = []
    is_open = False  # whether the last message is the model's, and may get more

    def add(place: str, message: dict[str, Any]) -> None:
        first = found[-1] if found else {}
        if message["role"] == "system" == first.get("role"):  # templates know one
            first["content"] += "\n\n" + message["content"]
            return
        found.append(message)
        places.append(place)

    if request.instructions is not None:
        add("instructions", {"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        add("input", {"role": "user", "content": request.input})
        return found, places
    for i, item in enumerate(request.input):
        place = f"input.{i}"
        _check_item(item, place)
        if isinstance(item, MessageItem) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            add(place, {"role": role, "content": _text(item.content)})
            is_open = False
            continue
        if isinstance(item, CallOutputItem):
            of = without_nulls(tool_call_id=item.call_id, name=item.name)
            add(place, {"role": "tool", **of, "content": _text(item.output)})
            is_open = False
            continue
        if not is_open or _is_full(found[-1], item):
            add(place, {"role": "assistant"})
            is_open = True
        _say(found[-1], item)
    return found, places


def _is_full(message: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> bool:
    """Whether an item begins another message of the model: thoughts come before texts, and these before calls."""
    has_text, has_calls = "content" in message, "tool_calls" in message
    if isinstance(item, CallItem):
        return False
    if isinstance(item, MessageItem):
        return has_text or has_calls
    return has_text or has_calls or "reasoning_content" in message


def _say(message: dict[str, Any], item: MessageItem | CallItem | ReasoningItem) -> None:
    if isinstance(item, MessageItem):
        message["content"] = _text(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    elif text := _text(item.content or item.summary or []):
        message["reasoning_content"] = text


def _check_item(item: MessageItem | CallItem | CallOutputItem | ReasoningItem, place: str) -> None:
    """Raise RequestError if an item or a part of it has a field that could say something."""
    known = _OF_ITEMS
    if isinstance(item, ReasoningItem) and (item.model_extra or {}).get("encrypted_content"):
        name = f"{place}.encrypted_content"
        raise RequestError(400, f"{name}: is another server's; leave the item out", param=name)
    refuse_unknown(item.model_extra, place=f"{place}.", known=known)
    for name in ("content", "output", "summary"):
        parts = getattr(item, name, None)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            refuse_unknown(part.model_extra, place=f"{place}.{name}.{i}.", known=known)


def _text(content: str | list[TextOfItem | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    for i, tool in enumerate(request.tools or ()):
        refuse_unknown(tool.model_extra, place=f"tools.{i}.")
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in request.tools or ()
    ]


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice
    refuse_unknown(choice.model_extra, place="tool_choice.")
    if isinstance(choice, NamedFunction):
        return _named(choice)
    for i, tool in enumerate(choice.tools):
        refuse_unknown(tool.model_extra, place=f"tool_choice.tools.{i}.")
    allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
    return {"type": choice.type, choice.type: allowed}


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _of_text(text: TextField | None) -> dict[str, Any]:
    if text is None:
        return {}
    refuse_unknown(text.model_extra, place="text.")
    form = text.format
    if form is not None and form.get("type") == "json_schema":
        rest = {name: one for name, one in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": rest}
    return without_nulls(response_format=form, verbosity=text.verbosity)


def _of_reasoning(reasoning: ReasoningField | None) -> dict[str, Any]:
    if reasoning is None:
        return {}
    refuse_unknown(reasoning.model_extra, place="reasoning.")
    return without_nulls(reasoning_effort=reasoning.effort)
