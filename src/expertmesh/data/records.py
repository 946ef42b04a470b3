"""Records, JSON objects or rows of tables, each with a text or a conversation in one of the common shapes.

A new shape is a row of `SHAPES`. The first record with a shape decides the shape of its file.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from expertmesh.data.conversation_lines import (
    ALL_FLAGS,
    ELSEWHERE,
    JUDGEMENTS,
    check_whole,
    checked,
)
from expertmesh.data.encoding import NotTextError, decoded, remedy
from expertmesh.data.pairs import PAIR_FORMS, SIDES
from expertmesh.data.turns import instructed, listed, said, said_or_listed, turn
from expertmesh.errors import ConfigError, named
from expertmesh.text.chat import MESSAGES, Conversation

TEXT, TALK, PAIR = "text", "conversation", "pair of answers"
"""Kinds of documents; the first is also the default field, or column, of a document's text."""
_PREFERENCES = ("chosen", "rejected", "rejected_response", "rejected_messages")
_MOST_FIELDS = 12


class NoRecordsError(ValueError):
    """A file has no known records; the message says what it has, and what is read."""

    def __init__(self, seen: str, rule: str) -> None:
        super().__init__(seen + rule)
        self.seen = seen


@dataclass(frozen=True)
class Shape:
    """Fields by which records hold a text or a conversation."""

    needed: tuple[str, ...]  # fields that each record has
    more: tuple[str, ...] = ()  # further fields that are read if present
    # function from a record to an object with `messages`; None: the one needed field holds a text
    conversation: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    beside: tuple[str, ...] = ()  # fields of a conversation that stand beside the text and are not read
    # whether `conversation` returns an object with the prompt's `messages`, and the messages `chosen` and `rejected`
    is_pair: bool = False

    @property
    def kind(self) -> str:
        """Kind of a record: text, conversation or pair of answers."""
        if self.conversation is None:
            return TEXT
        return PAIR if self.is_pair else TALK


def shape_of(values: Any, column: str | None = None) -> Shape | None:
    """The shape of a record; None: it has no known shape.

    Args:
        column: the field with the text, or the messages; None: any shape is allowed, first one with a `text`.
    """
    if not isinstance(values, Mapping):
        return None
    name = column or TEXT
    value = values.get(name)
    talk = None if column is not None else next((s for s in (*PAIRS, *SHAPES) if _fits(values, s)), None)
    if isinstance(value, str | bytes):
        return Shape((name,), beside=() if talk is None else talk.needed)
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return _talk(name)
    return talk


def found_shape(records: Iterable[Any], names: Iterable[str], column: str | None, *, what: str) -> Shape:
    """The shape of a file's records, taken from the first record with a shape.

    Args:
        names: columns of a table, for the message; empty: the fields of the first object.
    """
    names = list(names)
    for values in records:
        if (shape := shape_of(values, column)) is not None:
            return shape
        if not names and isinstance(values, Mapping):
            names = list(values)
    if not names:
        raise NoRecordsError("holds no JSON object", "; write one for each text or conversation")
    shown = ", ".join(map(ascii_name, names[:_MOST_FIELDS]))
    shown += ", ..." if len(names) > _MOST_FIELDS else ""
    if column is not None:
        raise NoRecordsError(
            f"{what} has {shown}",
            f", and no text or list of messages in {column!r}; name another: {named('data.column', 'NAME')}",
        )
    if wrong := _without_text(names):
        raise NoRecordsError(
            f"{what} has {shown}",
            f", and {' with '.join(map(repr, wrong))} is no text in any record; write it as text",
        )
    known = "; ".join(" with ".join(shape.needed) for shape in (Shape((TEXT,)), *SHAPES, *PAIRS))
    raise NoRecordsError(
        f"{what} has {shown}",
        f", and none of what is read ({known}); rename fields, or name the one with the text: "
        f"{named('data.column', 'NAME')}",
    )


def _without_text(names: Collection[str]) -> tuple[str, ...]:
    """The needed fields of the first shape that these names match; empty: none matches."""
    for needed in ((TEXT,), *(shape.needed for shape in (*PAIRS, *SHAPES))):
        if all(name in names for name in needed):
            return needed
    return ()


def known_fields(column: str | None = None) -> frozenset[str]:
    """Fields of all shapes, and fields that are checked; other columns of a table are not read."""
    fields = {name for shape in (*PAIRS, *SHAPES) for name in (*shape.needed, *shape.more)}
    checks = {*_PREFERENCES, *ELSEWHERE, *ALL_FLAGS, *JUDGEMENTS}
    return frozenset(fields | checks | {column or TEXT})


def ascii_name(name: object) -> str:
    """A field's name for a message, cut where it is long."""
    text = str(name)
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


@dataclass(frozen=True, slots=True)
class Row:
    """A document of a file that holds many; calling it returns the text."""

    # function that returns the record, or the text if there is no shape; raises a ValueError if it is unreadable
    values: Callable[[], Any] = field(compare=False)
    shape: Shape | None  # shape of the record; None: a plain text
    unit: str  # word for a document in its file: line, entry, row, document
    number: int  # number in the file, from 1
    where: str  # the file, for messages
    encoding: str | None = None  # encoding of texts that a table holds as bytes

    @property
    def kind(self) -> str:
        """Kind of the document: text, conversation or pair of answers."""
        return TEXT if self.shape is None else self.shape.kind

    def at(self, name: str) -> str:
        """Place of the document in a file of that name, for display."""
        if self.unit == "line":
            return f"{name}:{self.number}"
        return f"{name}, {self.unit} {self.number}"

    def __call__(self) -> str:
        """The text, or the conversation as JSON with sorted keys, so that equal conversations are equal texts."""
        if self.shape is None:
            return str(self.values())
        if self.shape.conversation is None:
            return self._text(self.shape)
        try:
            talk = _conversation(self.values(), self.shape)
            return json.dumps(talk, sort_keys=True, ensure_ascii=False)
        except (RecursionError, ValueError) as error:
            why = "is nested too deep" if isinstance(error, RecursionError) else str(error)
            if isinstance(error, NotTextError) and error.encoding is not None:
                raise self._wrong(f"{why}{remedy(error)}") from None
            raise self._wrong(f"{why}; correct the {self.unit}, or take it out") from None

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(f"{self.where}, {self.unit} {self.number}: {why}")

    def _text(self, shape: Shape) -> str:
        units, (name,) = (
            f"{self.unit[:-1]}ies" if self.unit == "entry" else f"{self.unit}s",
            shape.needed,
        )
        try:
            values = self.values()
            value = values.get(name) if isinstance(values, Mapping) else None
            if isinstance(value, bytes):
                value = decoded(value, self.encoding)
        except NotTextError as error:
            reason = error.reason.replace("files", units, 1)
            raise NotTextError(str(error), reason, error.encoding) from None
        except ValueError:
            values = value = None
        if not isinstance(values, Mapping):
            raise NotTextError("is not a JSON object", f"{units} are not a JSON object")
        if not isinstance(value, str):
            raise NotTextError(f"has no text in {name!r}", f"{units} have no text in {name!r}")
        try:
            check_whole({flag: values.get(flag) for flag in ALL_FLAGS if flag != name})
        except ValueError as error:
            fix = f"correct the {self.unit}, take it out, or rename a field that is no flag"
            raise self._wrong(f"{error}; {fix}") from None
        return value


def _conversation(values: Any, shape: Shape) -> Conversation:
    """The conversation of a record, or its pair of answers with their prompt; raises a ValueError if the record is
    none."""
    if not isinstance(values, Mapping):
        raise ValueError("is no object")
    if missing := [name for name in shape.needed if values.get(name) is None]:
        fields = ", ".join(map(ascii_name, list(values)[:_MOST_FIELDS])) or "nothing"
        raise ValueError(f"has no {missing[0]!r}, as others of the file do, but {fields}")
    assert shape.conversation is not None
    used = (*shape.needed, *shape.more)
    others = {name: value for name, value in values.items() if name not in used}
    made = shape.conversation(values)
    if not shape.is_pair:
        return _completed(values, {**others, **made})
    found: Conversation = {}
    for side in SIDES:
        whole = _completed(values, {**others, MESSAGES: [*made[MESSAGES], *made[side]]})
        count = len(whole[MESSAGES]) - len(made[side])
        found |= {**whole, MESSAGES: whole[MESSAGES][:count], side: whole[MESSAGES][count:]}
    return found


def _completed(values: Mapping[str, Any], found: dict[str, Any]) -> Conversation:
    """A conversation with the system's message and the tools of its record, checked."""
    system, tools = values.get("system"), values.get("tools")
    first = found[MESSAGES][0] if found[MESSAGES] else None
    has_one = isinstance(first, Mapping) and first.get("role") == "system"
    if isinstance(system, str) and system and not has_one:
        found[MESSAGES] = [said("system", system), *found[MESSAGES]]
    elif system:
        found["system"] = system  # which is refused
    if tools:
        found["tools"] = listed(tools, "tools") if isinstance(tools, str) else tools
    return checked(found)


def _fits(values: Mapping[str, Any], shape: Shape) -> bool:
    """Whether a record has what a shape needs: lists, texts, or lists written as JSON in the cell of a table."""
    for name in shape.needed:
        value = values.get(name)
        is_json = isinstance(value, str) and value.lstrip().startswith("[")
        of_text = is_json if name in (MESSAGES, "conversations") else isinstance(value, str)
        is_message = shape.is_pair and isinstance(value, Mapping)
        if not (isinstance(value, list) or of_text or is_message):
            return False
    return True


def _talk(name: str) -> Shape:
    """Shape of records with a list of messages in a field."""

    def conversation(values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {MESSAGES: [turn(one) for one in listed(values[name], name)]}

    # a user who names the field of right answers knows of the others
    preferences = () if name in (MESSAGES, "conversations") else _PREFERENCES
    return Shape((name,), ("system", "tools", *preferences), conversation)


def _instruction(values: Mapping[str, Any], *, beside: str, answer: str) -> Mapping[str, Any]:
    """Conversation of an Alpaca or Dolly record: instruction, its context, and answer; earlier turns in `history`."""
    return {MESSAGES: [*instructed(values, beside=beside), said("assistant", values[answer])]}


def _completion(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Conversation of a prompt and its completion, each a text or a list of messages."""
    found: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        found += said_or_listed(role, values[name])
    return {MESSAGES: found}


_ALPACA, _DOLLY = ("instruction", "output"), ("instruction", "response")
SHAPES = (
    _talk(MESSAGES),
    _talk("conversations"),
    Shape(
        _ALPACA,
        ("input", "history", "system"),
        partial(_instruction, beside="input", answer="output"),
    ),
    Shape(_DOLLY, ("context", "system"), partial(_instruction, beside="context", answer="response")),
    Shape(("prompt", "completion"), ("system", "tools"), _completion),
)
"""Shapes of conversations; the first that fits is used."""
PAIRS = tuple(
    Shape(needed, ("system", "tools", *more), function, is_pair=True) for needed, (more, function) in PAIR_FORMS.items()
)
"""Shapes of pairs of answers, looked for first."""
