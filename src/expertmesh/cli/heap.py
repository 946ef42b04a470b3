"""Setting of glibc's allocator to keep freed memory: without it, page faults take up to a third of a training step on the CPU."""

import ctypes
import sys

# glibc's malloc.h; the numbers are part of its binary interface.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep freed blocks for the next step instead of giving them back to the system.

    Otherwise every large tensor is mapped, zeroed page by page by the kernel, and unmapped in every step. With this
    setting the process holds its peak memory until it ends. Results do not change. The setting is process-wide and is
    not undone.

    Returns:
        Whether the settings were accepted; False if the allocator is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT))
