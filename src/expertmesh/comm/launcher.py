"""Watchdog that ends ranks whose launcher is gone.

Torchrun ends its ranks on SIGTERM. If it is killed (SIGKILL, the kernel's out-of-memory killer) it cannot, and its
ranks would compute on, with nobody to restart or stop them. Each rank therefore polls whether its parent process is
still the same, which works on every system.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from expertmesh.config.launched import is_first_on_host, is_launched

_POLL_S = 1.0
_GRACE_S = 300.0
"""Grace period for a last checkpoint, in seconds; a rank that waits longer for another one is then ended."""


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """Context in which this process gets a SIGTERM when torchrun is gone; training then saves and stops. Without
    torchrun, no effect."""
    if not is_launched():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(os.getppid(), over), daemon=True, name="launcher")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _end() -> None:
    os._exit(128 + signal.SIGTERM)


def _watch(
    launcher: int,
    over: threading.Event,
    stop: Callable[[], None] = _stop,
    end: Callable[[], None] = _end,
) -> None:
    """Call `stop` when the parent is no longer the launcher, and `end` if the process is not over within the grace
    period."""
    while not over.wait(_POLL_S):
        if os.getppid() == launcher:
            continue
        _say(f"torchrun (process {launcher}) is gone: its ranks stop")
        stop()
        if not over.wait(_GRACE_S):
            _say(f"a rank did not stop within {_GRACE_S:g} s: it is ended now")
            end()
        return


def _say(text: str) -> None:
    if is_first_on_host():
        with suppress(OSError, ValueError):  # the reader may be gone, too
            os.write(sys.stderr.fileno(), f"{text}\n".encode())
