"""Messages while a verb prepares: progress in place on a terminal, occasional lines elsewhere, and warnings."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from expertmesh.config.launched import launched_rank
from expertmesh.errors import Line

_FIRST_S = 2.0
_CLEAR = "\r\x1b[2K"
_THE_END = b"\0"


def tell(text: str, end: str = "\n") -> None:
    """Write a note to standard error; errors of writing are ignored, so that the verb goes on."""
    with suppress(OSError, ValueError):
        print(text, end=end, file=sys.stderr, flush=True)


class _News(logging.Handler):
    """Logging handler for standard error. Without a terminal the interval between progress lines doubles."""

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
        # A terminal of unknown width reports 0.
        width = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1 if in_place else None
        self._write(text[:width] if in_place else f"{text}\n")

    def clear(self) -> None:
        """Erase the progress line on the terminal."""
        if self._is_open:
            self._write(_CLEAR)
        self._is_open = False

    def _write(self, text: str) -> None:
        tell(text, end="")


@contextmanager
def told_of_data(*, verbose: bool = False) -> Iterator[None]:
    """Context that shows messages about data preparation. Under torchrun only rank 0 prints."""
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
    """Context that shows a loading message, while libraries and weights are read."""
    log = logging.getLogger("expertmesh.data")
    log.info("loading", extra={"is_progress": True})
    try:
        yield
    finally:
        log.info("", extra={"is_progress": True})


@contextmanager
def _interrupts_heard() -> Iterator[None]:
    """Context on a terminal in which Ctrl-C is acknowledged at once, and a second one ends the process at once.

    Python raises KeyboardInterrupt only when the running library returns to it, which takes seconds while a tokenizer
    is trained. Incomplete files are removed by the next run.
    """
    if not sys.stderr.isatty() or threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(target=_answer, args=(read_end, signal.getsignal(signal.SIGINT)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(write_end, _THE_END)  # closing the pipe is not enough: a forked process may hold it
        thread.join()
        os.close(write_end)
        os.close(read_end)


def _answer(read_end: int, usual: object) -> None:
    """Acknowledge signals whose numbers arrive in a pipe, unless another handler is installed."""
    heard = 0
    while (number := os.read(read_end, 1)) != _THE_END:
        # The training loop has its own handler.
        if number[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) != usual:
            continue
        heard += 1
        if heard > 1:
            os.write(sys.stderr.fileno(), b"\n")
            os._exit(128 + signal.SIGINT)
        os.write(sys.stderr.fileno(), f"{_CLEAR}SIGINT: stopping; Ctrl-C again: now\n".encode())


def silence_output() -> None:
    """Redirect standard output to the null device: otherwise Python flushes it at exit, and prints a traceback of the
    same error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
