"""Stop requests of a training run (SIGTERM, Ctrl-C, closed terminal, dead pipe), after which the loop saves and
returns."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SAME_S = 1.0
"""Seconds after a signal within which a SIGINT counts as the same request."""
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOBODY_READS = (signal.SIGHUP, signal.SIGPIPE)
"""Signals after which standard output is useless."""


class StopRequest:
    """Remembers the first SIGTERM, SIGINT or SIGHUP while the context is open; a later SIGINT interrupts at once.

    Under torchrun one Ctrl-C arrives twice, from the terminal and from torchrun, so signals within a second count once.
    An ignored SIGHUP (`nohup`) stays ignored.

    Outside the main thread, where Python allows no signal handlers, only `ask` works.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # first signal, or None
        # called at once on that signal, from the signal handler
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
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self, number: signal.Signals) -> None:
        """Request a stop as if this signal had arrived; only the first request is kept."""
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            if self.on_ask is not None:
                self.on_ask(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.ask(signal.Signals(number))
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_S:
            raise KeyboardInterrupt
