"""Messages of a conversation as chat interfaces write them, checked: roles, texts, calls of tools."""

from collections.abc import Iterator, Mapping
from typing import Any

from expertmesh.config.values import shown
from expertmesh.errors import ConfigError
from expertmesh.text.tools import read_calls

ROLES = ("system", "user", "assistant", "tool")
TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Field with the text of a part of a content, by the types of parts that are text: in chats, in responses, in a
refusal."""


def our_role(role: str) -> str:
    """Role of a message in OpenAI's interface, where the system is also "developer", by its name here."""
    return "system" if role == "developer" else role


def read_messages(given: Any) -> list[dict[str, Any]]:
    """Messages of a prompt, checked: roles as they are named here, contents as strings.

    Args:
        given: messages, each a mapping with a role (`ROLES`, or "developer") and a content: a string, or a list of
            {"type": "text", "text": string} (others: `TEXT_OF_PART`), which are joined; an assistant's may be missing
            or None. Other fields are kept for chat templates; the arguments of tool_calls become objects.
    """
    wanted = '[{"role": "user", "content": "..."}]'
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(f"must be a list of messages, such as {wanted}; give one")
    if not is_unicode(given):
        raise ConfigError("has half a character (a lone surrogate); correct it")
    found = []
    for number, message in enumerate(given, 1):
        values = message if isinstance(message, Mapping) else {}
        role, content = values.get("role"), _joined(values.get("content"))
        is_null = role == "assistant" and values.get("content") is None
        if not isinstance(role, str) or (content is None and not is_null):
            raise ConfigError(
                f"must be messages with a role and a text as content, such as {wanted}, and message {number} is not; "
                "correct it"
            )
        if our_role(role) not in ROLES:
            raise ConfigError(
                f"message {number} has role {shown(role)}, which is none of {', '.join(ROLES)}; correct it"
            )
        said = {**values, "role": our_role(role), "content": content}
        if values.get("tool_calls"):
            said["tool_calls"] = read_calls(values["tool_calls"], f"message {number}: tool_calls")
        else:
            said.pop("tool_calls", None)
            said["content"] = content or ""
        found.append(said)
    return found


def _joined(content: Any) -> str | None:
    """Text of a content; None: it is no text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple):
        return None
    texts = [_text_of(part) for part in parts]
    return None if None in texts else "".join(map(str, texts))


def _text_of(part: Any) -> str | None:
    """Text of a part of a content; None: it is no text."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    text = None if name is None else part.get(name)
    return text if isinstance(text, str) else None


def is_unicode(values: Any) -> bool:
    """Whether no text in JSON values has half a character (a lone surrogate), which UTF-8 cannot hold."""
    try:
        for text in strings_of(values):
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def strings_of(values: Any) -> Iterator[str]:
    """Strings in JSON values, keys included."""
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
