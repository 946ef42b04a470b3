"""Ranks end with the launcher that started them.

Torchrun ends its ranks when it is asked to end. Killed at once (SIGKILL, the kernel's lack of memory) it asks nobody, and they
would compute on, with nobody to restart them or to stop them. Each looks whether its parent is still the same, which every system
can tell.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from expertmesh.config.base import is_first_on_host, is_launched

_POLL_S = 1.0
_GRACE_S = 300.0
"""For a last checkpoint; a rank that waits for another one longer than that is ended."""


@contextmanager
def ended_with_launcher() -> Iterator[None]:
    """While it is open, this process gets a SIGTERM when torchrun is gone; training then saves and stops. Without torchrun, nothing."""
    if not is_launched():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(os.getppid(), over), daemon=True, name="launcher"
    )
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
    """Stop when the parent is another than the launcher; end if that is not over in time."""
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
        with suppress(OSError, ValueError):  # who reads may be gone, too
            os.write(sys.stderr.fileno(), f"{text}\n".encode())
