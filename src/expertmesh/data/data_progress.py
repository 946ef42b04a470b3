"""Progress of long preparations of data, logged by `expertmesh.data` at level INFO, and notes to the user.

Log records of progress have the attribute `is_progress`, so that a terminal can show the last one only.
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
"""End of a note on files that are left out."""

_log = logging.getLogger("expertmesh.data")
_T = TypeVar("_T")
_known = ContextVar("notes_known", default=False)


def say(text: str) -> None:
    """Log a line of progress; "": a terminal may clear the line."""
    _log.info("%s", text, extra={"is_progress": True})


def note(text: str | Line) -> None:
    """Log a warning about the data of a run, unless inside `notes_known`."""
    if not _known.get():
        _log.warning(text if isinstance(text, Line) else Line(text))


@contextmanager
def notes_known() -> Iterator[None]:
    """Context without `note`'s warnings, for later uses of a run, which logged them when it began."""
    token = _known.set(True)
    try:
        yield
    finally:
        _known.reset(token)


class Progress:
    """Logs every second how much is done. `unit`: unit of the amounts; with "MB ..." they are given in bytes."""

    def __init__(self, verb: str, *, total: int | None = None, unit: str = TEXT) -> None:
        self._verb, self._total, self._unit = verb, total, unit
        self._said = time.monotonic()

    def at(self, done: int) -> None:
        """Log that the amount `done` is done, at most once in `EVERY_S`."""
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        of = "" if self._total is None else f" of {self._number(self._total)}"
        say(f"{self._verb} {self._number(done)}{of} {self._unit}")

    def over(self, items: Iterable[_T], size: Callable[[_T], int] | None = None) -> Iterator[_T]:
        """The items, counted as they are consumed. `size`: amount of an item; None: 1."""
        done = 0
        try:
            for item in items:
                yield item
                done += 1 if size is None else size(item)
                self.at(done)
        finally:
            self.finish()

    def finish(self) -> None:
        """End the progress: a terminal may clear its line."""
        say("")

    def _number(self, count: int) -> str:
        return f"{count / 1e6:,.1f}" if self._unit.startswith("MB") else f"{count:,}"
