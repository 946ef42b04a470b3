"""Standard streams that cannot be written, as on a full disk."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path


def _full() -> io.TextIOWrapper:
    return io.TextIOWrapper(Path("/dev/full").open("wb", buffering=0), write_through=True)


@contextmanager
def full_screen() -> Iterator[None]:
    """Context in which each write to standard output fails at once."""
    with _full() as file, redirect_stdout(file):
        yield


@contextmanager
def full_log() -> Iterator[None]:
    """Context in which each write to standard error fails at once."""
    with _full() as file, redirect_stderr(file):
        yield
