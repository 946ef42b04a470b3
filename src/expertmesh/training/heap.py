"""Freed memory of glibc's heap: kept from step to step, and given back where the heap has grown too ragged to use it
again.

Without the first, page faults take up to a third of a training step on the CPU. Without the second, a heap whose blocks
change their sizes with each step's routing grows for as long as the run lasts.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# glibc's malloc.h; the numbers are part of its binary interface.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1
GROWTH = 1.15
"""Factor by which resident memory has to grow, since the first step after a trim, for another trim."""


def _of_glibc(name: str) -> Any:
    """A function of glibc's allocator; None with another allocator."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep freed blocks for the next step instead of giving them back to the system.

    Otherwise every large tensor is mapped, zeroed page by page by the kernel, and unmapped in every step. Results do
    not change. The setting is process-wide and is not undone.

    Returns:
        Whether the settings were accepted; False if the allocator is not glibc's.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))


def anonymous_bytes() -> int:
    """Resident bytes of this process that are of no file; Linux only."""
    resident, shared = Path("/proc/self/statm").read_bytes().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


class HeapTrim:
    """Gives the freed pages of the heap back after a step that left the process 1.15 times as large as it needs to
    be."""

    def __init__(
        self,
        size: Callable[[], int] = anonymous_bytes,
        trim: Callable[[int], object] | None = None,
    ) -> None:
        self.size, self.trim = size, trim or _of_glibc("malloc_trim")
        self.needed: int | None = None

    def before_steps(self) -> None:
        """Give back freed blocks of other work, as scoring or an evaluation; a step does not use them again."""
        if self.trim is not None:
            self.trim(0)
            self.needed = None

    def after_step(self) -> None:
        """Look at the process's size; the first step after a trim says what is needed."""
        if self.trim is None:
            return
        size = self.size()
        if self.needed is None:
            self.needed = size
        elif size > GROWTH * self.needed:
            self.trim(0)
            self.needed = None
