"""Stopping a run from outside: SIGTERM and Ctrl-C ask, the loop saves and returns."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Remembers the first SIGTERM or SIGINT while the context is open; a second SIGINT interrupts at once.

    Outside the main thread, where Python allows no signal handlers, it never asks to stop.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
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
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
