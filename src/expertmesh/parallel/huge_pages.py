"""Memory for weights in pages of 2 MB, which a processor walks through faster than 4 KB ones (docs/log.md); on Linux
only.

Memory is aligned and marked before its first touch, so loading reads into it and nothing is moved afterwards. It is
zero. Where the system has no such pages it is ordinary memory. Some virtual machines get such pages slowly from their
host, so only a process that will use weights for long has them (`in_huge_pages`). `THP_MEM_ALLOC_ENABLE`, torch's own
switch, decides for all: 1 or 0.
"""

import logging
import math
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.comm.bind import read_text

_log = logging.getLogger("expertmesh.checkpoints")
PAGE_BYTES = 1 << 21
LEAST_BYTES = 2 * PAGE_BYTES
"""Bytes of a tensor from which it has pages of its own; smaller ones would waste them."""
_ROOT = Path("/")
_is_asked: ContextVar[bool] = ContextVar("_is_asked", default=False)


def zeros_in_huge_pages(shape: torch.Size, dtype: torch.dtype, *, make: Callable[..., mmap.mmap] = mmap.mmap) -> Tensor:
    """Contiguous zeros on the CPU that loading touches first, in pages of 2 MB where wanted and given (`make` maps
    them)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        held = make(-1, num_bytes + PAGE_BYTES, flags=flags)
    except OSError:  # torch has the words for too little memory
        return torch.zeros(shape, dtype=dtype, device="cpu")
    whole = torch.frombuffer(held, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    if is_wanted():
        with suppress(OSError):  # a system without such pages
            held.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // PAGE_BYTES * PAGE_BYTES)
    return whole[start : start + num_bytes].view(dtype).view(shape)


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Weights that are loaded within get pages of 2 MB, unless the environment turns them off."""
    token = _is_asked.set(True)
    try:
        yield
    finally:
        _is_asked.reset(token)


def is_wanted() -> bool:
    """Whether this system can have such pages, and they are asked for here or by the environment."""
    said = os.environ.get("THP_MEM_ALLOC_ENABLE", "1" if _is_asked.get() else "0")
    return hasattr(mmap, "MADV_HUGEPAGE") and said == "1"


def huge_page_mode(root: Path = _ROOT) -> str:
    """Setting of the system: always, madvise or never; "" if it does not say."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else ""


def huge_page_bytes(root: Path = _ROOT) -> int:
    """Bytes of this process that are in such pages."""
    found = re.search(r"^AnonHugePages:\s+(\d+) kB$", read_text(root / "proc/self/smaps_rollup"), re.M)
    return int(found[1]) << 10 if found else 0


def say_huge_pages(num_bytes: int) -> None:
    """Log how much of the weights that were loaded on the CPU is in such pages. `num_bytes`: bytes of the weights."""
    if num_bytes >= LEAST_BYTES and _log.isEnabledFor(logging.INFO) and (mode := huge_page_mode()):
        _log.info(
            "weights: %s MB, of this process %s MB in pages of 2 MB (transparent_hugepage: %s)",
            *(f"{num_bytes >> 20:,}", f"{huge_page_bytes() >> 20:,}", mode),
        )
