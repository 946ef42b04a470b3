"""Stopping a run from outside: SIGTERM and Ctrl-C ask, the loop saves and returns."""

import signal
import threading
import time
from types import FrameType
from typing import Any

SAME_S = 1.0
"""A SIGINT within so many seconds of another signal is the same request."""


class StopRequest:
    """Remembers the first SIGTERM or SIGINT while the context is open; a later SIGINT interrupts at once.

    Under torchrun one Ctrl-C comes twice, from the terminal and from torchrun, so signals within a second are one.

    Outside the main thread, where Python allows no signal handlers, it never asks to stop.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._since > SAME_S:
            raise KeyboardInterrupt
