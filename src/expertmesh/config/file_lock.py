"""Lock files among processes; the system releases a lock when its process dies."""

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO


def exclusive(path: Path, *, wait: bool = True) -> IO[str]:
    """A lock file that nobody else holds, open and locked until it is closed; made if it does not exist."""
    return _locked(path, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def shared(path: Path) -> IO[str]:
    """A lock file that others may share, open and locked until it is closed; waits for a process that has it to
    itself."""
    return _locked(path, fcntl.LOCK_SH)


def _locked(path: Path, kind: int) -> IO[str]:
    """The lock file that is there now: a lock on one that was removed meanwhile keeps nobody out."""
    while True:
        with ExitStack() as stack:
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, kind)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    stack.pop_all()
                    return file
