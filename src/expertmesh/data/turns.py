"""Messages of conversations as files hold them: by role and content, or as ShareGPT has them."""

from collections.abc import Mapping
from typing import Any

from expertmesh.config.base import parse_json

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
}
"""Our roles by names of ShareGPT's `from`."""


def said(role: str, content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content}


def turn(message: Any) -> Any:
    """A message, converted from ShareGPT's `from` and `value` if needed."""
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    found = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    return {**said(role, message.get("value")), **found}


def listed(value: Any, name: str) -> Any:
    """A list, parsed from JSON if a table holds it so."""
    if isinstance(value, str | bytes):
        try:
            value = parse_json(value)
        except ValueError:
            raise ValueError(f"has no list {name!r}, nor JSON of one") from None
    if not isinstance(value, list):
        raise ValueError(f"has no list {name!r}")
    return value


def said_or_listed(role: str, value: Any) -> list[Any]:
    """Messages of a field: a list of them, one, or the text of one by a role."""
    if isinstance(value, Mapping):
        return [turn(value)]
    return [*map(turn, value)] if isinstance(value, list) else [said(role, value)]


def instructed(values: Mapping[str, Any], *, beside: str) -> list[Any]:
    """Messages of an instruction and its context, the field `beside`; earlier turns are in `history`."""
    asked, about = values["instruction"], values.get(beside)
    if about and isinstance(about, str) and isinstance(asked, str):
        asked = f"{asked}\n{about}"
    turns = []
    for pair in listed(values.get("history") or [], "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("has a 'history' that is no list of pairs")
        turns += [said("user", pair[0]), said("assistant", pair[1])]
    return [*turns, said("user", asked)]
