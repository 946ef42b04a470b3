"""Tools of a conversation, and calls of them in its history, as OpenAI's interface writes them."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from expertmesh.config.base import parse_json
from expertmesh.config.values import shown
from expertmesh.errors import ConfigError

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WANTED = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
_DEEPEST = 128


def read_tools(given: Any, place: str = "tools") -> list[dict[str, Any]]:
    """Tools of a prompt, checked; fields that are not known here stay for chat templates.

    Args:
        given: tools, each {"type": "function", "function": {"name", "description", "parameters"}}.
    """
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{place}: must be a list of tools, such as [{_WANTED}]; give one")
    if len(given) > MOST_TOOLS:
        raise ConfigError(f"{place}: has {len(given)} tools; give at most {MOST_TOOLS}")
    names: dict[str, int] = {}
    for number, tool in enumerate(given):
        here = f"{place}.{number}"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise ConfigError(f"{here}.type: must be function; write {_WANTED}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise ConfigError(f"{here}.function: must be an object with a name; write {_WANTED}")
        name = _name(function.get("name"), f"{here}.function.name")
        if name in names:
            raise ConfigError(f"{here}.function.name: {name!r} is the name of tool {names[name]}, too; choose another")
        names[name] = number
        _check_parameters(function.get("parameters"), f"{here}.function.parameters")
        for field, kind in (("description", str), ("strict", bool)):
            if not isinstance(function.get(field), kind | None):
                wanted = "text" if kind is str else "true or false"
                raise ConfigError(f"{here}.function.{field}: must be {wanted}; correct it")
    return [dict(tool) for tool in given]


def parameters_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parameters of tools by name, as JSON schemas of objects; a null is what is not given."""
    found = {}
    for function in (tool["function"] for tool in tools):
        given = (function.get("parameters") or {}).items()
        found[function["name"]] = {"type": "object", **{k: v for k, v in given if v is not None}}
    return found


def _name(given: Any, place: str) -> str:
    if not isinstance(given, str) or _NAME.fullmatch(given) is None:
        raise ConfigError(
            f"{place}: must be a name of at most 64 letters, digits, _, - and dots, and is {shown(given)}; correct it"
        )
    return given


def _check_parameters(given: Any, place: str) -> None:
    """Raise ConfigError if parameters are no JSON schema of an object, as far as a parser of calls reads it."""
    if given is None:
        return
    wanted = 'write {"type": "object", "properties": {...}}'
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}: must be a JSON schema of an object; {wanted}")
    if given.get("type") not in (None, "object"):
        raise ConfigError(f"{place}.type: must be object; {wanted}")
    properties = given.get("properties")
    if not isinstance(properties, Mapping | None):
        raise ConfigError(f"{place}.properties: must be schemas by name; {wanted}")
    for name, one in (properties or {}).items():
        if not isinstance(one, Mapping | bool):
            raise ConfigError(f"{place}.properties.{str(name)[:40]}: must be a schema; {wanted}")


def read_calls(given: Any, place: str) -> list[dict[str, Any]]:
    """Calls in a message, checked, with their arguments as objects.

    Args:
        given: calls, each {"id", "type": "function", "function": {"name", "arguments"}}; arguments are the JSON text of
            an object, or the object.
    """
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{place}: must be a list of calls; correct it")
    found = []
    for number, call in enumerate(given):
        here = f"{place}.{number}"
        if not isinstance(call, Mapping) or (call.get("type") or "function") != "function":
            raise ConfigError(f"{here}.type: must be function; correct it")
        if not isinstance(call.get("id"), str | None):
            raise ConfigError(f"{here}.id: must be text; correct it")
        function = call.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{here}.function.name: must be text; give the function's name")
        arguments = _object(function.get("arguments"), f"{here}.function.arguments")
        found.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return found


def _object(given: Any, place: str) -> Any:
    """Object of arguments; none are an empty one."""
    if isinstance(given, str) and given.strip():
        try:
            given = parse_json(given.encode())
        except (ValueError, RecursionError):
            raise ConfigError(f"{place}: is no JSON; give the JSON text of an object, such as {{}}") from None
    given = given or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}: must be an object; give its JSON text, such as {{}}")
    return given


def fitting_id(call_id: str, size: int) -> str:
    """Id of a call as a template with ids of a certain size reads it: its end where that fits, else one made of it."""
    end = call_id[-size:]
    if len(end) == size and end.isascii() and end.isalnum():
        return end
    return hashlib.blake2b(call_id.encode()).hexdigest()[:size]
