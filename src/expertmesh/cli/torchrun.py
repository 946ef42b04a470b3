"""Several processes with one voice: what torchrun's ranks print, and what torchrun learns of a failure."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from expertmesh.config.base import (
    is_first_on_host,
    is_launched,
    launched_rank,
    launcher_error_file,
    ranks_on_host,
)
from expertmesh.errors import CheckpointError, ConfigError, PeerError, text_of

_PATIENCE_S = 30.0
"""How long a rank that stops because of another waits for that one to say why; torchrun ends all at the first exit."""

_LINGER_S = 10.0
"""The same, of a rank that has said itself what it knows: that another one is lost."""

_POLL_S = 0.05
_FOLLOWS = "follows_another"
"""Key in a rank's error file: its failure may only follow from another rank's."""


@contextmanager
def once_per_host() -> Iterator[None]:
    """Mistakes that every process of a host makes alike, as in the command line, are said by the first of them.

    Raises:
        PeerError: on the others, in the place of a ConfigError or CheckpointError, with the same words.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if is_first_on_host():
            raise
        raise PeerError(text_of(error)) from error


@contextmanager
def once_by_rank_0() -> Iterator[None]:
    """As `once_per_host`, over several hosts: mistakes that all ranks find alike are said by rank 0.

    Raises:
        PeerError: on the others, with the same words.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if launched_rank()[0] == 0:
            raise
        raise PeerError(text_of(error)) from error


def another_speaks() -> bool:
    """Whether another rank of this host has said why it fails; waits for that.

    A rank that stops because of another must neither be silent nor leave before that one has spoken: at the first exit torchrun ends all.
    """
    return _hears_another(_PATIENCE_S)


def linger() -> None:
    """Wait a little for the rank whose failure was the cause, before this one's exit ends it. For one that has spoken and told the launcher."""
    if launcher_error_file() is not None:
        _hears_another(_LINGER_S)


def _hears_another(patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while True:
        told = _told_by_others()
        if any(not follows for follows in told):
            return True
        if len(told) >= ranks_on_host() - 1 or time.monotonic() >= end:
            return False  # all others follow from something else, or nobody speaks
        time.sleep(_POLL_S)


def _told_by_others() -> list[bool]:
    """Of each other rank of this host that has told torchrun of a failure: whether it only follows from another's.

    Torchrun gives each rank a file in a folder of its own, and these folders are neighbours.
    """
    own = launcher_error_file()
    found = []
    for path in [] if own is None else own.parent.parent.glob(f"*/{own.name}"):
        if path != own:
            with suppress(OSError, ValueError):  # it is being written
                found.append(bool(json.loads(path.read_text()).get(_FOLLOWS)))
    return found


def report_to_elastic(message: str, *, is_mistake: bool, follows: bool = False) -> None:
    """Let torchrun's own report end with the reason of the failure; without torchrun, nothing.

    Torchrun takes the oldest failure for the cause, in whole seconds. A mistake was there before any rank ended; another
    failure is older than what follows from it.

    Args:
        message: the line that was printed.
        is_mistake: of the user, found before work began.
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
    """End this process; a rank of torchrun does it without the interpreter's tidying up, when all its files are closed.

    A thread of gloo may still hold a tensor of the last collective. When it lets go of it while the interpreter ends, torch
    2.13 asks for the interpreter's lock, and the process aborts after a good run (seen once in 71 runs on a busy machine).
    """
    if not is_launched():
        raise SystemExit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
