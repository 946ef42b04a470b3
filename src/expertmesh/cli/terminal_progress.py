"""What a person is told while a verb prepares: progress in place on a terminal, now and then elsewhere; warnings always."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from expertmesh.config.base import launched_rank
from expertmesh.errors import Line

_FIRST_S = 2.0
_CLEAR = "\r\x1b[2K"
_THE_END = b"\0"


class _News(logging.Handler):
    """Writes to standard error. Elsewhere than on a terminal, the pauses between lines of progress double."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()
        self._next = self._began + _FIRST_S
        self._is_open = False

    def emit(self, record: logging.LogRecord) -> None:
        from expertmesh.cli.prog_name import Flags

        is_progress, text = getattr(record, "is_progress", False), record.getMessage()
        if text and not is_progress:
            kind = f"{record.levelname.lower()}: " if record.levelno > logging.DEBUG else ""
            text = kind + (Flags().spell(record.msg) if isinstance(record.msg, Line) else text)
        if not text:
            self.clear()
            return
        in_place = is_progress and sys.stderr.isatty()
        if is_progress and not in_place:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + (now - self._began)
        self.clear()
        self._is_open = in_place
        # A terminal that does not know its width says 0.
        width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if in_place else None
        self._write(text[:width] if in_place else f"{text}\n")

    def clear(self) -> None:
        """Wipe the line of progress that is on the terminal."""
        if self._is_open:
            self._write(_CLEAR)
        self._is_open = False

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a full disk below standard error stops no work
            sys.stderr.write(text)
            sys.stderr.flush()


@contextmanager
def told_of_data(*, verbose: bool = False) -> Iterator[None]:
    """Show what the package says of the data that it prepares. Under torchrun only the first rank speaks.

    Args:
        verbose: each text that is left out, too.
    """
    log = logging.getLogger("expertmesh.data")
    handler = _News() if launched_rank()[0] == 0 else logging.NullHandler()
    before = log.level, log.propagate
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        with _interrupts_heard():
            yield
    finally:
        if isinstance(handler, _News):
            handler.clear()
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextmanager
def loading() -> Iterator[None]:
    """Says that something is on its way, while libraries and weights are read."""
    log = logging.getLogger("expertmesh.data")
    log.info("loading", extra={"is_progress": True})
    try:
        yield
    finally:
        log.info("", extra={"is_progress": True})


@contextmanager
def _interrupts_heard() -> Iterator[None]:
    """On a terminal, Ctrl-C is answered at once, and a second one ends the process at once.

    Python raises KeyboardInterrupt when the library that runs comes back to it, which takes seconds where a tokenizer is
    learned. What is half made then is removed by the next run.
    """
    if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_answer, args=(read_end, signal.getsignal(signal.SIGINT)), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(write_end, _THE_END)  # a closed end would not do: a forked process may hold it
        thread.join()
        os.close(write_end)
        os.close(read_end)


def _answer(read_end: int, usual: object) -> None:
    """Answers each number of a signal that comes through a pipe, where nobody else does."""
    heard = 0
    while (number := os.read(read_end, 1)) != _THE_END:
        # The training loop has a handler of its own.
        if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) != usual:
            continue
        heard += 1
        if heard > 1:
            os.write(sys.stderr.fileno(), b"\n")
            os._exit(128 + signal.SIGINT)
        os.write(sys.stderr.fileno(), f"{_CLEAR}SIGINT: stopping; Ctrl-C again: now\n".encode())


def silence_output() -> None:
    """Let standard output go nowhere: at exit Python would flush it, and print a traceback of the same failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
