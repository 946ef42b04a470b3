"""Small tables that the host knows and the device looks things up in."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of nested numbers on a device.

    `torch.tensor(values, device="cuda")` would wait until the GPU's stream is empty, and with it for all rows that this
    stream waits for.

    Args:
        values: numbers, or sequences of them.
        device: where the tensor is to be.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)
