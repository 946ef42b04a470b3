"""Several processes with one voice: what torchrun's ranks print, and what torchrun learns of a failure."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from expertmesh.config.base import is_first_on_host, is_launched, launcher_error_file
from expertmesh.errors import CheckpointError, ConfigError, PeerError

_PATIENCE_S = 30.0
"""How long a rank waits for the first one of its host to say what is wrong; torchrun ends all at the first exit."""


@contextmanager
def said_once() -> Iterator[None]:
    """Mistakes that every process of a host makes alike, as in the command line, are said by the first of them.

    Raises:
        PeerError: on the others, in the place of a ConfigError or CheckpointError; late, or the first would be ended before it spoke.
    """
    try:
        yield
    except (ConfigError, CheckpointError):
        if is_first_on_host():
            raise
        time.sleep(_PATIENCE_S)
        raise PeerError("the first rank of this host says what is wrong") from None


def tell_launcher(message: str, *, is_mistake: bool) -> None:
    """Let torchrun's own report end with the reason of the failure; without torchrun, nothing.

    Torchrun takes the oldest failure for the cause, in whole seconds. A mistake was there before any rank ended; another
    failure is older than what follows from it.
    """
    path = launcher_error_file()
    if path is None:
        return
    with suppress(OSError):
        seconds = path.parent.stat().st_mtime if is_mistake else time.time() - 1
        extra = {"py_callstack": message, "timestamp": str(int(seconds))}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


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
