"""Parsers of answers with markers: thoughts are told from the rest first, then calls from content."""

import re
import secrets
import string
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from expertmesh.text.answer_pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Piece,
    Thought,
)
from expertmesh.text.call_syntax import CallSyntax, MalformedCallError, ReadCall, Tools

_ALPHABET = string.ascii_letters + string.digits


def new_id(size: int | None = None) -> str:
    """Id of a call: OpenAI's, or some letters and digits."""
    if size is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ALPHABET) for _ in range(size))


class ThoughtSyntax(Protocol):
    """Syntax of thoughts."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        ...

    @property
    def span(self) -> tuple[str, str]:
        """Texts before and behind a thought."""
        ...

    def is_open(self, prompt: str, said: str = "") -> bool:
        """Whether an answer begins within a thought."""
        ...

    def is_over(self, prompt: str) -> bool:
        """Whether the end of a prompt closes the thoughts of its answer."""
        ...

    def parser(self, *, is_open: bool) -> AnswerParser:
        """Parser that yields thoughts and content."""
        ...


class ThoughtTags(NamedTuple):
    """Thoughts between two markers, before the answer itself."""

    opens: str
    closes: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Both markers."""
        return tuple(self)

    @property
    def span(self) -> tuple[str, str]:
        """Both markers."""
        return self.opens, self.closes

    def is_open(self, prompt: str, said: str = "") -> bool:
        """Whether the prompt, or the message that is continued, opened the thought."""
        is_inside = said.rfind(self.opens) > said.rfind(self.closes)
        return is_inside or (not said and prompt.rstrip().endswith(self.opens))

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt closes the thoughts, as Qwen3's does with enable_thinking=False."""
        return prompt.rstrip().endswith(self.closes)

    def parser(self, *, is_open: bool) -> AnswerParser:
        """Parser that yields thoughts and content."""
        return _TagParser(self, is_open=is_open)


class _TagParser:
    """Parser of thoughts between markers; blanks around the markers are part of nothing."""

    def __init__(self, tags: ThoughtTags, *, is_open: bool) -> None:
        self._tags, self._held = tags, ""
        self._step = self._inside if is_open else self._before
        self._has_said = False

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain."""
        self._held += text
        found: list[Piece] = []
        step = None
        while step != self._step:
            step = self._step
            step(found)
        return found

    def finish(self) -> list[Piece]:
        """Pieces that were held back."""
        text, self._held = self._held, ""
        if self._step == self._inside:
            text = text.rstrip() if self._has_said else text.strip()
            return [Thought(text)] if text else []
        return [Content(text)] if text and self._step == self._before else []

    def _before(self, found: list[Piece]) -> None:
        """At the beginning: a thought, or none."""
        bare, opens = self._held.lstrip(), self._tags.opens
        if bare.startswith(opens):
            self._held, self._step = bare[len(opens) :], self._inside
        elif not opens.startswith(bare):
            self._step = self._behind

    def _inside(self, found: list[Piece]) -> None:
        """Read a thought, whose last blanks are held back: they may stand before its end."""
        if not self._has_said:
            self._held = self._held.lstrip()
        inner, mark, rest = self._held.partition(self._tags.closes)
        said = inner.rstrip() if mark else inner[: -_held_back(inner, self._tags.closes) or None]
        if said:
            found.append(Thought(said))
            self._has_said = True
        if mark:
            self._held, self._step = rest, self._blanks
        else:
            self._held = inner[len(said) :]

    def _blanks(self, found: list[Piece]) -> None:
        """Behind a thought, before the answer."""
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._behind

    def _behind(self, found: list[Piece]) -> None:
        if self._held:
            found.append(Content(self._held))
        self._held = ""


def _begun(text: str, marks: Iterable[str]) -> int:
    """Number of last characters of a text that may be the beginning of a mark."""
    return max(n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n]))


def _held_back(text: str, mark: str) -> int:
    """Number of last characters of a text that may be the beginning of a mark, and of blanks before it."""
    bare = text[: len(text) - _begun(text, [mark])]
    return len(text) - len(bare.rstrip())


class HarmonyChannels:
    """Channels of gpt-oss: analysis is a thought, final is content, and commentary to a function is a call.

    A call goes on as content that begins with `<|channel|>` and ends with `<|call|>`, for the parser of calls.
    """

    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    span = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"

    def is_open(self, prompt: str, said: str = "") -> bool:
        """Whether the prompt ends in the message of a thought."""
        head, mark, rest = prompt.rpartition("<|message|>")
        is_begun = bool(mark) and not any(one in rest for one in self.markers)
        return is_begun and "analysis" in head.rpartition("<|channel|>")[2]

    def is_over(self, prompt: str) -> bool:
        """Whether thoughts are over: never, because each has a channel."""
        return False

    def parser(self, *, is_open: bool) -> AnswerParser:
        """Parser that yields thoughts and content."""
        return _HarmonyParser(is_open=is_open)


_MARK = re.compile("|".join(map(re.escape, HarmonyChannels.markers)))
_HEADS = ("<|start|>", "<|channel|>")


class _HarmonyParser:
    def __init__(self, *, is_open: bool) -> None:
        self._held = ""
        self._head: str | None = None if is_open else ""
        self._kind: Callable[[str], Piece] = Thought if is_open else Content
        self._is_call = False

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain."""
        self._held += text
        found: list[Piece] = []
        while (mark := _MARK.search(self._held)) is not None:
            self._take(self._held[: mark.start()], found)
            self._held = self._held[mark.end() :]
            self._turn(mark[0], found)
        cut = len(self._held) - _begun(self._held, HarmonyChannels.markers)
        self._take(self._held[:cut], found)
        self._held = self._held[cut:]
        return found

    def finish(self) -> list[Piece]:
        """Pieces that were held back; a head without a message says nothing, unless it is a call's."""
        found: list[Piece] = []
        self._take(self._held, found)
        head, self._held, self._head = self._head or "", "", None
        if head.strip() and ("to=" in head or not any(mark in head for mark in _HEADS)):
            found.append(Content(head))
        return found

    def _take(self, text: str, found: list[Piece]) -> None:
        """Text without marks: of a head, or of a message; an answer without marks is content."""
        if self._head is not None:
            self._head += text
            bare = self._head.lstrip()
            is_marked = any(mark in bare for mark in _HEADS)
            if is_marked or bare.startswith("to=") or "to=".startswith(bare):
                return
            text, self._head = self._head, None
        if text:
            found.append(self._kind(text))

    def _turn(self, mark: str, found: list[Piece]) -> None:
        if mark in _HEADS:
            if self._head is None:
                self._head = ""
            self._head += mark
        elif mark == "<|message|>" and self._head is not None:
            head, self._head = self._head, None
            self._is_call = "to=functions." in head
            is_thought = "analysis" in head and not self._is_call
            self._kind = Thought if is_thought else Content
            if self._is_call:
                head = head.replace("<|start|>", "").replace("<|channel|>", " ").strip()
                found.append(Content(f"<|channel|>{head.removeprefix('assistant')}<|message|>"))
        else:
            if self._is_call:
                found.append(Content("<|call|>"))
            self._head, self._is_call = "", False


class MarkedParser:
    """Parser of an answer that may have thoughts and calls."""

    def __init__(self, thoughts: AnswerParser, calls: AnswerParser) -> None:
        self._thoughts, self._calls = thoughts, calls

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain."""
        return self._rest(self._thoughts.feed(text))

    def finish(self) -> list[Piece]:
        """Pieces that were held back."""
        return [*self._rest(self._thoughts.finish()), *self._calls.finish()]

    def _rest(self, parts: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in parts:
            found += self._calls.feed(piece.text) if isinstance(piece, Content) else [piece]
        return found


class CallParser:
    """Parser of calls of tools. A block of calls is given when it is whole; one that is no block stays content."""

    def __init__(
        self,
        syntax: CallSyntax,  # how calls are written
        tools: Tools,  # tools that may be called; a call of another name is content
        *,
        most: int | None = None,  # maximum number of calls, further ones are left out; None: any number
        id_size: int | None = None,  # letters and digits of an id; None: OpenAI's form. A model's own id is kept.
    ) -> None:
        self._syntax, self._tools, self._most, self._id_size = syntax, tools, most, id_size
        self._held, self._blanks = "", ""
        self._looked = 0  # characters of the block that hold no end marker
        self._has_said = self._is_inside = False
        self._count = self._misses = 0

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain."""
        self._held += text
        found: list[Piece] = []
        while self._inside(found) if self._is_inside else self._outside(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        """Pieces that were held back: a block that is not closed is one of calls if it reads as such."""
        found: list[Piece] = []
        while self._is_inside:
            begin = self._begin
            try:
                calls = self._read(self._held[len(begin) :])
            except MalformedCallError:
                self._give_back(found)
                while self._inside(found) if self._is_inside else self._outside(found):
                    pass
                continue
            self._say(calls, found)
            self._held, self._is_inside = "", False
        if self._held.strip() or self._has_said or not self._count:
            self._content(self._held, found)
        self._held = ""
        return found

    def _outside(self, found: list[Piece]) -> bool:
        """Read content; returns whether a block has begun."""
        syntax = self._syntax
        if self._misses >= _MOST_MISSES:
            self._content(self._held, found)
            self._held = ""
            return False
        if self._count and not self._has_said:  # blanks behind a call
            self._held = self._held.lstrip()
        if not self._has_said and not self._count:
            bare = self._held.lstrip()
            if not syntax.begin or (syntax.end is None and bare.startswith(_WHOLE)):
                if not bare:
                    return False
                if bare.startswith(syntax.first):
                    self._begin, self._is_inside = "", True
                    return True
        at = self._held.find(syntax.begin) if syntax.begin else -1
        if at >= 0:
            said = self._held[:at].rstrip()
            self._content(said, found)
            self._blanks, self._held = self._held[len(said) : at], self._held[at:]
            self._begin, self._is_inside, self._looked = syntax.begin, True, 0
            return True
        size = len(self._held) - _held_back(self._held, syntax.begin or " ")
        self._content(self._held[:size], found)
        self._held = self._held[size:]
        return False

    def _inside(self, found: list[Piece]) -> bool:
        """Read a block; returns whether it is over."""
        syntax, size = self._syntax, len(self._begin)
        if not self._looked and not self._may_begin(self._held[size:].lstrip()):
            self._give_back(found)
            return True
        if syntax.end is None:
            return False
        at = self._held.find(syntax.end, max(self._looked, size))
        if at < 0:
            self._looked = max(len(self._held) - len(syntax.end) + 1, 0)
            return False
        try:
            calls = self._read(self._held[size:at])
        except MalformedCallError as error:
            if error.is_cut and self._misses < _MOST_MISSES:  # the marker may be part of a value
                self._looked, self._misses = at + 1, self._misses + 1
            else:
                self._give_back(found)
            return True
        self._say(calls, found)
        self._held, self._is_inside = self._held[at + len(syntax.end) :], False
        return True

    def _may_begin(self, text: str) -> bool:
        """Whether calls may begin with a text, or it with them."""
        first = self._syntax.first
        return not first or any(text.startswith(one) or one.startswith(text) for one in first)

    def _read(self, text: str) -> list[ReadCall]:
        calls = self._syntax.read(text, self._tools)
        if any(one.name not in self._tools for one in calls):
            raise MalformedCallError
        return calls

    def _give_back(self, found: list[Piece]) -> None:
        """The beginning of a block that is none, as content; what follows is looked through again."""
        size = len(self._begin) or len(self._held)
        self._content(self._blanks + self._held[:size], found)
        self._held, self._blanks, self._is_inside, self._looked = self._held[size:], "", False, 0
        self._misses += 1

    def _content(self, text: str, found: list[Piece]) -> None:
        if text:
            self._has_said = True
            found.append(Content(text))

    def _say(self, calls: list[ReadCall], found: list[Piece]) -> None:
        self._blanks, self._has_said = "", False
        for call in calls:
            if self._most is not None and self._count >= self._most:
                return
            call_id = call.call_id or new_id(self._id_size)
            found.append(CallStart(self._count, call_id, call.name))
            found.append(CallArguments(self._count, call.arguments))
            self._count += 1


_MOST_MISSES = 64
"""Blocks of an answer that may be malformed before it is all content: each is read up to its end."""
_WHOLE = ("{", "[")
"""Beginnings of answers that are calls in JSON without a marker."""
