"""Memory that is used again and again while tensors are worked on some rows at a time."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Memory for what is computed some rows at a time: where each operation takes new memory, the page faults are what it costs.

    Args:
        device: of all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def table(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of whatever values, in the memory that this name had before.

        Args:
            name: tables that are needed at once have different ones.
            shape: its sizes.
            dtype: of the elements.
        """
        count = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or len(flat) < count:
            flat = self._flat[name, dtype] = torch.empty(count, dtype=dtype, device=self.device)
        return flat[:count].view(*shape)


class Workspaces(dict[torch.device, Workspace]):
    """One for each device that is asked for."""

    def __missing__(self, device: torch.device) -> Workspace:
        """A new one."""
        return self.setdefault(device, Workspace(device))
