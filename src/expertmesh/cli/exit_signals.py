"""Signals that end a verb by SystemExit, so that it puts its files in order first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_exit() -> Iterator[None]:
    """Context in which the first SIGTERM or SIGHUP raises SystemExit, and later ones do not disturb the cleanup.

    An ignored SIGHUP (`nohup`) stays ignored. Outside the main thread, where Python allows no signal handlers, the
    context does nothing.
    """
    before: dict[signal.Signals, Any] = {}

    def leave(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
