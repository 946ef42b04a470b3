"""Stopping a run from outside: SIGTERM, Ctrl-C, a closed terminal or a dead pipe ask, the loop saves and returns."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SAME_S = 1.0
"""A SIGINT within so many seconds of another signal is the same request."""
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOBODY_READS = (signal.SIGHUP, signal.SIGPIPE)
"""After these there is no use in writing to standard output."""


class StopRequest:
    """Remembers the first SIGTERM, SIGINT or SIGHUP while the context is open; a later SIGINT interrupts at once.

    Under torchrun one Ctrl-C comes twice, from the terminal and from torchrun, so signals within a second are one. A
    SIGHUP that is ignored (`nohup`) stays so.

    Outside the main thread, where Python allows no signal handlers, only `ask` asks to stop.

    Attributes:
        signal: what asked first, or None.
        on_ask: called at once when that comes, in the middle of whatever runs.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.on_ask: Callable[[signal.Signals], None] | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in ASKING:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, number: signal.Signals) -> None:
        """Ask to stop as if this signal had come; the first counts."""
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            if self.on_ask is not None:
                self.on_ask(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.ask(signal.Signals(number))
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_S:
            raise KeyboardInterrupt
