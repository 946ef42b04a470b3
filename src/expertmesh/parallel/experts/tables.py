"""Copies of small host tables to the device, without synchronizing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Tensor of nested numbers on a device.

    `torch.tensor(values, device="cuda")` would block the host until the GPU's stream is empty.
    """
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)
