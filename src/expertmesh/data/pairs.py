"""Forms in which files hold pairs of answers, a chosen and a rejected one, to a prompt: TRL's, LLaMA-Factory's,
ms-swift's."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from expertmesh.data.turns import instructed, listed, said_or_listed, turn
from expertmesh.text.chat import MESSAGES
from expertmesh.text.messages import our_role

SIDES = ("chosen", "rejected")
"""Fields of the answers, the better one first."""
Pair = dict[str, list[Any]]
"""`messages` of the prompt, and messages of the answers, `chosen` and `rejected`."""


def _with_prompt(values: Mapping[str, Any]) -> Pair:
    """TRL's form with a prompt; an answer that begins with the prompt's turns has the prompt in itself."""
    prompt = said_or_listed("user", values["prompt"])
    sides = [said_or_listed("assistant", values[side]) for side in SIDES]
    if any(_role(side) not in ("assistant", None) for side in sides):
        return _with_common_prompt(*sides)
    return _pair(prompt, *sides)


def _without_prompt(values: Mapping[str, Any]) -> Pair:
    """TRL's form without a prompt, which is what both answers begin with."""
    chosen, rejected = (values[side] for side in SIDES)
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return _with_common_prompt(*(said_or_listed("assistant", values[side]) for side in SIDES))
    count = _common(chosen, rejected)
    while count and not chosen[count - 1 : count].isspace():
        count -= 1
    prompt = chosen[:count].rstrip()
    if not prompt:
        raise ValueError("has no prompt: 'chosen' and 'rejected' begin with different words")
    cut = len(prompt)
    sides = (said_or_listed("assistant", text[cut:]) for text in (chosen, rejected))
    return _pair(said_or_listed("user", prompt), *sides)


def _ranked(values: Mapping[str, Any]) -> Pair:
    """LLaMA-Factory's ranking of ShareGPT conversations."""
    prompt = [turn(one) for one in listed(values["conversations"], "conversations")]
    return _pair(prompt, *(said_or_listed("assistant", values[side]) for side in SIDES))


def _of_instruction(values: Mapping[str, Any]) -> Pair:
    """LLaMA-Factory's ranking of Alpaca records."""
    prompt = instructed(values, beside="input")
    return _pair(prompt, *(said_or_listed("assistant", values[side]) for side in SIDES))


def _rejected_response(values: Mapping[str, Any]) -> Pair:
    """ms-swift's form: messages whose last turn is the chosen answer, and the text of the rejected one."""
    messages = [turn(one) for one in listed(values[MESSAGES], MESSAGES)]
    if not messages or _role(messages[-1:]) != "assistant":
        raise ValueError(f"has {MESSAGES!r} that do not end with the assistant's chosen answer")
    rejected = said_or_listed("assistant", values["rejected_response"])
    return _pair(messages[:-1], messages[-1:], rejected)


def _rejected_messages(values: Mapping[str, Any]) -> Pair:
    """ms-swift's form with two whole conversations."""
    whole = (listed(values[name], name) for name in (MESSAGES, "rejected_messages"))
    return _with_common_prompt(*([turn(one) for one in messages] for messages in whole))


PAIR_FORMS: Mapping[tuple[str, ...], tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Pair]]] = {
    ("prompt", *SIDES): ((), _with_prompt),
    ("conversations", *SIDES): ((), _ranked),
    ("instruction", *SIDES): (("input", "history"), _of_instruction),
    (MESSAGES, "rejected_response"): ((), _rejected_response),
    (MESSAGES, "rejected_messages"): ((), _rejected_messages),
    SIDES: ((), _without_prompt),
}
"""Needed fields of each form, with further fields that are read, and the function from a record to its pair."""


def _pair(prompt: list[Any], chosen: list[Any], rejected: list[Any]) -> Pair:
    for side, messages in zip(SIDES, (chosen, rejected), strict=True):
        if not messages or _role(messages) != "assistant":
            raise ValueError(f"has no turn of the assistant at the beginning of {side!r}")
    return {MESSAGES: prompt, SIDES[0]: chosen, SIDES[1]: rejected}


def _with_common_prompt(chosen: list[Any], rejected: list[Any]) -> Pair:
    """A pair of conversations, whose prompt is all that comes before the first turn that differs."""
    count = _common(chosen, rejected)
    if count == min(len(chosen), len(rejected)):  # one is the beginning of the other, or both are equal
        count = max((i for i in range(count) if _role(chosen[i:]) == "assistant"), default=count)
    rest = chosen[count:], rejected[count:]
    if not all(_role(side) == "assistant" for side in rest):
        raise ValueError(
            f"has different prompts in {SIDES[0]!r} and {SIDES[1]!r}: they differ in message {count + 1}, which is no "
            "answer"
        )
    return _pair(chosen[:count], *rest)


def _common(one: Any, other: Any) -> int:
    """Length of the common beginning of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _role(messages: Any) -> Any:
    """Role of the first message; None: it has none."""
    first = messages[0] if messages else None
    role = first.get("role") if isinstance(first, Mapping) else None
    return our_role(role) if isinstance(role, str) else role


def prompt_of(pair: bytes) -> bytes:
    """Prompt of a pair in JSON, in JSON: everything but the answers."""
    values = {name: value for name, value in json.loads(pair).items() if name not in SIDES}
    return json.dumps(values, sort_keys=True).encode()
