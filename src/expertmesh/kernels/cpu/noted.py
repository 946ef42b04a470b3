"""Calls of the kernels in C, noted while a step is recorded to be repeated on the same memory."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

NO_MEMORY = -2
"""Result of a kernel that found no memory."""


class NotedCall(NamedTuple):
    """A call of a kernel, with what must live as long as it is repeated."""

    function: Callable[[int], int | None]  # entry of the shared object; a result other than 0 or None is an error
    address: int  # address of the struct
    kept: Any  # the struct, and the tensors that it points to


_thread = threading.local()


@contextmanager
def noting(note: Callable[[NotedCall], None] | None) -> Iterator[None]:
    """Context in which the calls of this thread are given to a function; None: they are not."""
    before = getattr(_thread, "note", None)
    _thread.note = note
    try:
        yield
    finally:
        _thread.note = before


def is_noting() -> bool:
    """Whether calls of this thread are noted."""
    return getattr(_thread, "note", None) is not None


def call(function: Callable[[int], int | None], struct: Any, *tensors: Any) -> int | None:
    """Call a kernel with a struct of the addresses of these tensors."""
    address = ctypes.addressof(struct)
    result = function(address)
    if (note := getattr(_thread, "note", None)) is not None:
        note(NotedCall(function, address, (struct, tensors)))
    return result
