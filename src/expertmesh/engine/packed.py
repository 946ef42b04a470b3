"""Numbers of a step in one buffer: to the device by one copy, and back by one copy, the only wait of a step."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

WHOLE, REAL = "q", "d"
"""Kinds of an `array` that is packed: int64 and FP64."""


def packed(parts: Sequence[array], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Copy numbers to a device.

    Returns:
        The int64 buffer, and views of it, one for each part, int64 or FP64.

    Example:
        >>> from array import array
        >>> packed([array("q", [1, 2]), array("d", [0.5])], torch.device("cpu"))[1]
        [tensor([1, 2]), tensor([0.5000], dtype=torch.float64)]
    """
    words = bytearray().join(memoryview(part) for part in parts)
    host = torch.frombuffer(words, dtype=torch.int64) if words else torch.empty(0).long()
    whole = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)  # fmt: skip
    return whole, views(whole, [(part.typecode, len(part)) for part in parts])


def views(whole: Tensor, sizes: Sequence[tuple[str, int]]) -> list[Tensor]:
    """Parts of a buffer of which the kinds and sizes are given."""
    parts = whole.split([size for _, size in sizes])
    return [part.view(torch.float64) if kind == REAL else part for part, (kind, _) in zip(parts, sizes, strict=True)]


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors as int64 or FP64 on the host, by one copy; waits for the device."""
    words = [(t.double().view(torch.int64) if t.is_floating_point() else t.long()).flatten() for t in tensors]
    whole = torch.cat(words).cpu() if words else torch.empty(0).long()
    kinds = [(REAL if t.is_floating_point() else WHOLE, t.numel()) for t in tensors]
    return [part.view(t.shape) for part, t in zip(views(whole, kinds), tensors, strict=True)]
