"""How far a long preparation is, for whoever listens to the logger `expertmesh.data` at level INFO.

Records of progress have the attribute `is_progress`, so that a terminal can show the last one only.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from expertmesh.errors import Line, command

EVERY_S = 1.0
TEXT = "MB of text"

NAMES_ALL = f"{command('train --verbose')} names all"
"""End of a note on what is left out."""

_log = logging.getLogger("expertmesh.data")
_T = TypeVar("_T")
_known = ContextVar("notes_known", default=False)


def say(text: str) -> None:
    """What is being done now; "": what a terminal shows of it may go."""
    _log.info("%s", text, extra={"is_progress": True})


def note(text: str | Line) -> None:
    """Warns of something about the data of a run that a user should know, unless the run has said it before."""
    if not _known.get():
        _log.warning(text if isinstance(text, Line) else Line(text))


@contextmanager
def notes_known() -> Iterator[None]:
    """Leaves out what the run has said of its data when it began: for what is done with a run later."""
    token = _known.set(True)
    try:
        yield
    finally:
        _known.reset(token)


class Progress:
    """Says every second how much is done.

    Args:
        verb: what is done, as in "read" or "tokenised".
        total: how much there is; None: unknown.
        unit: what is counted; of "MB ..." bytes are.
    """

    def __init__(self, verb: str, *, total: int | None = None, unit: str = TEXT) -> None:
        self._verb, self._total, self._unit = verb, total, unit
        self._said = time.monotonic()

    def at(self, done: int) -> None:
        """So much is done."""
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        of = "" if self._total is None else f" of {self._number(self._total)}"
        say(f"{self._verb} {self._number(done)}{of} {self._unit}")

    def over(self, items: Iterable[_T], size: Callable[[_T], int] | None = None) -> Iterator[_T]:
        """The items, counted as they are used up.

        Args:
            items: to go through.
            size: how much an item counts; None: 1.
        """
        done = 0
        try:
            for item in items:
                yield item
                done += 1 if size is None else size(item)
                self.at(done)
        finally:
            self.finish()

    def finish(self) -> None:
        """What a terminal shows of it may go."""
        say("")

    def _number(self, count: int) -> str:
        return f"{count / 1e6:,.1f}" if self._unit.startswith("MB") else f"{count:,}"
