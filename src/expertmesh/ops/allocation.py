"""Large uninitialised tensors without a page fault for every 4 KiB.

The system allocator returns blocks of some megabytes to the kernel when they are freed, so every training step pays
for their pages again: on a virtual machine 0.5 ms per MiB, a fifth of a BF16 layer. Linux serves such blocks in
pages of 2 MiB where it is told to (NumPy does this for its arrays), at a seventh of that price.
"""

import ctypes
import sys
from functools import cache

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_SMALL_PAGE_BYTES = 4096
_MADV_HUGEPAGE = 14


def empty_large(
    shape: tuple[int, ...] | torch.Size, like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Give an uninitialised contiguous tensor on the device of another one, in huge pages where that helps.

    Args:
        shape: its shape.
        like: gives the device, and the dtype unless one is given.
        dtype: another type.
    """
    tensor = like.new_empty(shape, dtype=dtype)
    num_bytes = tensor.numel() * tensor.element_size()
    if (
        tensor.device.type == "cpu"
        and num_bytes >= 2 * _HUGE_PAGE_BYTES
        and (madvise := _madvise())
    ):
        first = -(-tensor.data_ptr() // _SMALL_PAGE_BYTES) * _SMALL_PAGE_BYTES
        last = (tensor.data_ptr() + num_bytes) // _SMALL_PAGE_BYTES * _SMALL_PAGE_BYTES
        # a hint: what it returns does not matter, the memory is good either way
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
    return tensor


@cache
def _madvise() -> "ctypes._NamedFuncPointer | None":
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)
