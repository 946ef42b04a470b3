"""Pieces of an answer: content, thoughts and calls of tools, as every writer of answers sees them."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Next characters of the answer itself."""

    text: str


class Thought(NamedTuple):
    """Next characters of the reasoning before the answer."""

    text: str


class CallStart(NamedTuple):
    """Beginning of a call of a tool; its arguments follow as `CallArguments` of the same index."""

    # number of the call in its answer, from 0
    index: int  # type: ignore[assignment]
    call_id: str  # id of the call, as long and of such characters as the model's chat template wants
    name: str  # name of the function


class CallArguments(NamedTuple):
    """Next characters of the JSON text of a call's arguments."""

    index: int  # type: ignore[assignment]
    text: str


Piece = Content | Thought | CallStart | CallArguments


class AnswerParser(Protocol):
    """Parser of one answer. However a text is cut, the pieces say the same in sum; empty pieces do not occur."""

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain once this text has come; it may be empty."""
        ...

    def finish(self) -> list[Piece]:
        """Pieces that are left when no text comes any more; called once."""
        ...


class PlainParser:
    """Parser of an answer without markers: all of it is content."""

    def feed(self, text: str) -> list[Piece]:
        """The text as content."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """Pieces that were held back: none."""
        return []


def joined(parts: Iterable[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind (and of one call) joined, and empty ones left out."""
    found: list[Piece] = []
    for piece in parts:
        if isinstance(piece, CallStart):
            found.append(piece)
            continue
        last = found[-1] if found else None
        if type(last) is type(piece) and last[:-1] == piece[:-1]:
            found[-1] = piece._replace(text=last[-1] + piece.text)
        elif piece.text:
            found.append(piece)
    return found
