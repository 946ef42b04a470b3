"""Blocks of an answer: its pieces as thoughts, texts and calls that begin, grow and end, one after the other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from expertmesh.serve.reading import Job
from expertmesh.serve.updates import Updates
from expertmesh.text.answer_pieces import CallArguments, CallStart, Piece, Thought


@dataclass
class AnswerBlock:
    """Block of an answer."""

    index: int  # its number in the answer, from 0
    kind: Literal["thought", "text", "call"]  # what it is
    text: str = ""  # its text; of a call, the JSON text of the arguments
    call_id: str = ""
    name: str = ""  # function of a call


class BlockChange(NamedTuple):
    """Change of a block."""

    what: Literal["begin", "grow", "end"]  # whether it begins, grows or ends
    block: AnswerBlock  # the block, after it
    new: str = ""  # new characters


@dataclass
class Blocks:
    """Blocks of one answer."""

    all: list[AnswerBlock] = field(default_factory=list)  # the blocks so far
    _open: AnswerBlock | None = None

    def feed(self, parts: Iterable[Piece]) -> Iterator[BlockChange]:
        """Changes that the next parts make."""
        for piece in parts:
            if isinstance(piece, CallStart):
                yield from self._begin("call", piece.call_id, piece.name)
                continue
            kind: Literal["thought", "text"] = "thought" if isinstance(piece, Thought) else "text"
            if not isinstance(piece, CallArguments) and (self._open is None or self._open.kind != kind):
                yield from self._begin(kind)
            block = self._open
            assert block is not None
            block.text += piece.text
            yield BlockChange("grow", block, piece.text)

    def finish(self) -> Iterator[BlockChange]:
        """End the open block; an answer with neither text nor calls has an empty text."""
        if not any(block.kind != "thought" for block in self.all):
            yield from self._begin("text")
        yield from self._end()

    def _begin(
        self, kind: Literal["thought", "text", "call"], call_id: str = "", name: str = ""
    ) -> Iterator[BlockChange]:
        yield from self._end()
        self._open = AnswerBlock(len(self.all), kind, "", call_id, name)
        self.all.append(self._open)
        yield BlockChange("begin", self._open)

    def _end(self) -> Iterator[BlockChange]:
        block, self._open = self._open, None
        if block is not None:
            yield BlockChange("end", block)


@dataclass
class BlockWriter:
    """Base of the writers of one answer in blocks, whose streams have events with names."""

    job: Job
    model: str
    _blocks: Blocks = field(default_factory=Blocks, kw_only=True)

    def __post_init__(self) -> None:
        """Start the updates of the answer."""
        self._updates = Updates(self.job)

    @property
    def is_named(self) -> bool:
        """Events have names."""
        return True
