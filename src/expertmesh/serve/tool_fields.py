"""Tools of a request: which there are, which may be called, and whether one must be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from expertmesh.errors import ConfigError
from expertmesh.serve.faults import RequestError
from expertmesh.text.tools import parameters_of, read_tools

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_WORDS = ("none", "auto", "required")
_CHOICE = "tool_choice"


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request."""

    tools: list[dict[str, Any]] = field(default_factory=list)  # all tools, for the prompt
    callable: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameters of those that may be called, by name
    must_call: bool = False  # whether the answer is a call
    most: int | None = None  # maximum number of calls in an answer; None: any number


def read_tool_use(fields: Mapping[str, Any]) -> ToolUse:
    """Tools of a request from its fields `tools`, `tool_choice` and `parallel_tool_calls`."""
    try:
        tools = read_tools(fields.get("tools") or [])
    except ConfigError as error:
        raise _wrong(str(error)) from None
    parallel = fields.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise _wrong("parallel_tool_calls: must be true or false; correct it")
    known = parameters_of(tools)
    choice = fields.get(_CHOICE)
    names, must = _chosen("auto" if choice is None else choice, known)
    is_named = isinstance(choice, Mapping) and choice.get("type") == "function"
    most = 1 if parallel is False or is_named else None
    return ToolUse(tools, {name: known[name] for name in names}, must, most)


def _chosen(choice: Any, known: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Names of the tools that may be called, and whether one must be."""
    if choice in _WORDS:
        if choice == "required" and not known:
            raise _wrong(f"{_CHOICE}: is required, and there are no tools; give tools, or leave it out")
        return ([] if choice == "none" else list(known)), choice == "required"
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return [_known(choice, _CHOICE, known)], True
    if kind == "allowed_tools":
        return _allowed(choice.get(kind), f"{_CHOICE}.{kind}", known)
    wanted = '{"type": "function", "function": {"name": "..."}}'
    raise _wrong(f"{_CHOICE}: must be none, auto, required, or {wanted}; correct it")


def _allowed(given: Any, place: str, known: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Names and whether one must be called, of OpenAI's {"mode": "auto" or "required", "tools": [...]}."""
    if not isinstance(given, Mapping) or given.get("mode") not in _WORDS[1:]:
        raise _wrong(f"{place}.mode: must be auto or required; correct it")
    tools = given.get("tools")
    if not isinstance(tools, list) or not tools:
        raise _wrong(f"{place}.tools: must be a list of functions; name one")
    names = [_known(one, f"{place}.tools.{i}", known) for i, one in enumerate(tools)]
    return list(dict.fromkeys(names)), given["mode"] == "required"


def _known(given: Any, place: str, known: Mapping[str, Any]) -> str:
    """Name of a tool that there is."""
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(f"{place}.function.name: must be the name of a tool; give one")
    if name not in known:
        has = ", ".join(known)[:200] if known else "there are none"
        raise _wrong(f"{place}.function.name: {name[:64]!r} is none of the tools ({has}); choose one")
    return name


def _wrong(line: str) -> RequestError:
    return RequestError(400, line, param=line.partition(":")[0])
