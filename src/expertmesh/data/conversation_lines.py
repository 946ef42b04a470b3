"""Check of conversations in JSON: their form, and the fields that are refused.

A conversation is an object whose `messages` is a list of {"role": ..., "content": ...}. The content is a string, or a
list of {"type": "text", "text": ...}, which are joined. A flag of an answer (`weight` 0 or 1, `train` false or true,
...) says whether it is learned. Further fields of a message, and the object's `tools`, are kept for the chat template.
Fields that other programs read and this one does not are refused, and so are a flag that excludes a whole record, text
or conversation, and a judgement of its answer. `expertmesh.data.records` turns other shapes into this one.
"""

from collections.abc import Mapping
from typing import Any

from expertmesh.config.base import parse_json
from expertmesh.text.chat import MESSAGES, NOT_LEARNED, Conversation
from expertmesh.text.messages import ROLES, is_unicode, our_role

FLAGS = (
    "weight",
    "train",
    "training",
    "trainable",
    "train_on_turn",
    "loss",
    "loss_mask",
    "loss_scale",
    "loss_weight",
)
"""Names of the flag by which a message is learned or not: OpenAI's and Mistral's, axolotl's, ms-swift's, verl's."""
ALL_FLAGS = (*FLAGS, NOT_LEARNED)
"""`FLAGS` and the flag with the opposite meaning."""
JUDGEMENTS = ("kto_tag", "label", "chosen", "rejected")
"""Fields by which a line says, as a Boolean, whether its answer is good (unpaired preferences): LLaMA-Factory's; TRL's
and ms-swift's; two names of paired preferences."""
_PREFERENCES = "preferences are not learned; keep what is right as messages"
ELSEWHERE = {
    "functions": "write them as 'tools'",
    "system": "write it as the first message, of role system",
    "system_prompt": "write it as the first message, of role system",
    "chat_template_kwargs": "put them into the chat template",
    "documents": "put them into a message",
    "chosen": _PREFERENCES,
    "rejected": _PREFERENCES,
    "rejected_response": _PREFERENCES,
    "rejected_messages": _PREFERENCES,
    "images": "only text is learned",
    "videos": "only text is learned",
    "audios": "only text is learned",
}
"""Fields of a line that change what other programs learn from it, each with a fix."""
_OF_MESSAGES = {
    "function_call": "write it as 'tool_calls'",
    "train_detail": "parts of a message are not told apart; leave it out",
    "training_detail": "parts of a message are not told apart; leave it out",
    "segments": "parts of a message are not told apart; leave it out",
    "audio": "only text is learned",
    "images": "only text is learned",
}
"""Fields of a message that change what other programs learn from it, each with a fix."""


def checked(given: bytes | Mapping[str, Any]) -> Conversation:
    """A conversation from an object or its JSON."""
    values: Any = given
    if isinstance(given, bytes):
        try:
            values = parse_json(given)
        except ValueError:
            raise ValueError("is not JSON") from None
    messages = values.get(MESSAGES) if isinstance(values, Mapping) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"has no list {MESSAGES!r} with messages in it")
    _check_fields(values, ELSEWHERE, "the line")
    for name in JUDGEMENTS:
        value = values.get(name)
        # a label of another type is a class or an id
        if isinstance(value, bool) or (name == "kto_tag" and value is not None):
            raise ValueError(f"the line has {name!r}, which is not read: {_PREFERENCES}")
    check_whole(values)
    found: Conversation = {MESSAGES: [_message(m, n) for n, m in enumerate(messages, 1)]}
    if values.get("tools"):
        _check_characters(values["tools"], "'tools'")
        found["tools"] = values["tools"]
    return found


def check_whole(values: Mapping[str, Any]) -> None:
    """Check the flags of a whole line."""
    if not all(_flags(values, "the line").values()):
        raise ValueError("says of the whole line that it is not learned")


def of_cell(name: str, text: str) -> Any:
    """Value of a cell in a table without types.

    Args:
        name: the column. Cells of flags and judgements are read as numbers and Booleans, and blank ones as None.
    """
    if name not in ALL_FLAGS and name not in JUDGEMENTS:
        return text
    return _OF_CELLS.get(text.strip().lower(), text)


_OF_CELLS = {"": None, "0": 0, "0.0": 0, "1": 1, "1.0": 1, "false": False, "true": True}


def _message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is no object")
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str):
        role = our_role(role)
    if role not in ROLES:
        raise ValueError(f"message {number} has role {role!r}, which is none of {', '.join(ROLES)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no text as its content")
    what = f"message {number}"
    _check_fields(message, _OF_MESSAGES, what)
    flags = _flags(message, what)
    if len(set(flags.values())) > 1:
        raise ValueError(f"{what} has {' and '.join(map(repr, flags))}, which contradict each other")
    if role != "assistant" and any(flags.values()):
        name = next(iter(flags))
        raise ValueError(f"{what} has {name!r}, and only what the assistant says is learned")
    found = {name: value for name, value in message.items() if name not in ALL_FLAGS}
    found |= {"role": role, "content": content}
    if role == "assistant" and not all(flags.values()):
        found[NOT_LEARNED] = True
    _check_characters(found, what)
    return found


def _flags(values: Mapping[str, Any], what: str) -> dict[str, bool]:
    """The flags that are set, each as whether the message or line is learned."""
    found = {}
    for name in ALL_FLAGS:
        value = values.get(name)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{what} has {name!r} {value!r}, which is neither 0 nor 1")
        found[name] = bool(value) is not (name == NOT_LEARNED)
    return found


def _check_fields(values: Mapping[str, Any], names: Mapping[str, str], what: str) -> None:
    for name, fix in names.items():
        if values.get(name):
            raise ValueError(f"{what} has {name!r}, which is not read: {fix}")


def _check_characters(values: Any, what: str) -> None:
    """Raise a ValueError if a text in the values has a lone surrogate, which UTF-8 cannot hold."""
    if not is_unicode(values):
        raise ValueError(f"{what} has half a character (a lone surrogate)")


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"message {number} has a part {kind!r}, and only text is learned")
