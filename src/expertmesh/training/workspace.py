"""Reusable scratch memory for operations that process tensors some rows at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Scratch memory by name; without reuse, page faults of fresh memory dominate the cost of such operations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def table(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized tensor in the memory of this name.

        Args:
            name: tables that are in use at the same time need different names.
            shape: shape of the tensor.
        """
        count = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or len(flat) < count:
            flat = self._flat[name, dtype] = torch.empty(count, dtype=dtype, device=self.device)
        return flat[:count].view(*shape)


class Workspaces(dict[torch.device, Workspace]):
    """Workspaces by device, created on first use."""

    def __missing__(self, device: torch.device) -> Workspace:
        """New workspace of a device."""
        return self.setdefault(device, Workspace(device))
