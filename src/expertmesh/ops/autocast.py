"""Autocast, on every kind of device: the meta device has none, and torch raises when asked about it there."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast computes in on this device now; None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A region in which nothing is cast; free where autocast is off anyway."""
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
