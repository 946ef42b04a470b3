"""Output of several ranks as one: rank 0 prints, and torchrun learns the cause of a failure."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from expertmesh.config.launched import (
    is_first_on_host,
    is_launched,
    launched_rank,
    launcher_error_file,
    ranks_on_host,
)
from expertmesh.errors import CheckpointError, ConfigError, PeerError, text_of

_PATIENCE_S = 30.0
"""Seconds that a rank which stops because of another waits for that rank's message; torchrun ends all ranks at the
first exit."""

_LINGER_S = 10.0
"""Seconds that a rank waits after it has reported that another rank was lost."""

_POLL_S = 0.05
_FOLLOWS = "follows_another"
"""Key in a rank's error file: its failure may be a consequence of another rank's."""


@contextmanager
def once_per_host() -> Iterator[None]:
    """Context in which only the first process of a host raises errors that all of its processes detect alike."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if is_first_on_host():
            raise
        raise PeerError(text_of(error)) from error


@contextmanager
def once_by_rank_0() -> Iterator[None]:
    """Context in which only rank 0 raises errors that all ranks of all hosts detect alike."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if launched_rank()[0] == 0:
            raise
        raise PeerError(text_of(error)) from error


def another_speaks() -> bool:
    """Whether another rank of this host has reported its failure; waits for it.

    A rank that stops because of another must neither be silent nor exit before that rank has reported: torchrun ends
    all ranks at the first exit.
    """
    return _hears_another(_PATIENCE_S)


def linger() -> None:
    """Wait a little for the rank that caused the failure, before this rank's exit ends it. Call it after this rank has
    reported."""
    if launcher_error_file() is not None:
        _hears_another(_LINGER_S)


def _hears_another(patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while True:
        told = _told_by_others()
        if any(not follows for follows in told):
            return True
        if len(told) >= ranks_on_host() - 1 or time.monotonic() >= end:
            return False  # all others are consequences as well, or nobody reports
        time.sleep(_POLL_S)


def _told_by_others() -> list[bool]:
    """Failures that other ranks of this host have reported: for each, whether it may be a consequence of another's.

    Torchrun gives each rank an error file in its own folder, and these folders are neighbours.
    """
    own = launcher_error_file()
    found = []
    for path in [] if own is None else own.parent.parent.glob(f"*/{own.name}"):
        if path != own:
            with suppress(OSError, ValueError):  # the file is being written
                found.append(bool(json.loads(path.read_text()).get(_FOLLOWS)))
    return found


def report_to_elastic(message: str, *, is_mistake: bool, follows: bool = False) -> None:
    """Write the reason of a failure for torchrun's own report; without torchrun it does nothing.

    Torchrun takes the oldest failure, in whole seconds, as the cause. Invalid input precedes the end of any rank, and
    other failures precede their consequences.

    Args:
        is_mistake: whether it is invalid input, detected before work started.
        follows: whether another rank may have failed before.
    """
    path = launcher_error_file()
    if path is None:
        return
    with suppress(OSError):
        seconds = path.parent.stat().st_mtime if is_mistake else time.time() - (not follows)
        extra = {"py_callstack": message, "timestamp": str(int(seconds))}
        told = {"message": {"message": message, "extraInfo": extra}, _FOLLOWS: follows}
        path.write_text(json.dumps(told))


def leave(code: int) -> NoReturn:
    """End this process; under torchrun without the interpreter's shutdown, after all files are closed.

    A gloo thread may still hold a tensor of the last collective. If it frees the tensor during shutdown, torch 2.13
    acquires the interpreter's lock, and the process aborts after a successful run (seen once in 71 runs on a busy
    machine).
    """
    if not is_launched():
        raise SystemExit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
