"""Copies of small GPU tensors to the host that wait only for them, while `tolist` would wait for all work queued on the
stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launch work on a side stream, which does not wait for the current stream; no effect on a CPU.

    Tensors that the work reads must live until the host has waited for the result.
    """
    if device.type != "cuda":
        yield
    else:
        with torch.cuda.stream(_stream(device)):
            yield


def on_host(x: Tensor) -> Callable[[], list[Any]]:
    """Start copying a tensor to the host.

    Args:
        x: small, of any shape and dtype.

    Returns:
        Function that waits for the copy, but not for later work, and returns `x.tolist()`.
    """
    x = x.detach()
    if x.device.type != "cuda":
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def numbers() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return numbers
