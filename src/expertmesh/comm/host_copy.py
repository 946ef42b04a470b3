"""Numbers of a GPU for the host, which waits for them alone: `tolist` would wait for all that the stream has to do before."""

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
    """What is launched here does not wait for the computation, unless it says so; on a CPU nothing changes.

    What it reads must live until the host has waited for the result.

    Args:
        device: of the computation.
    """
    if device.type != "cuda":
        yield
    else:
        with torch.cuda.stream(_stream(device)):
            yield


def on_host(x: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor to the host.

    Args:
        x: small, of any shape and dtype.

    Returns:
        What waits for the copy, and for nothing that is launched behind it, and gives `x.tolist()`.
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
