"""What the routers of a model add to its training loss, and what they did."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.moe.types import RoutingStats


@dataclass
class LoadCounter:
    """Routing statistics summed over the micro-batches of a step; no synchronisation.

    Attributes:
        counts: (E,) int64 rows chosen per expert, one tensor per MoE layer.
        num_dropped: scalar int64, rows dropped in all layers.
    """

    counts: list[Tensor]
    num_dropped: Tensor | None

    @classmethod
    def empty(cls) -> "LoadCounter":
        """Nothing counted."""
        return cls([], None)

    def add(self, stats: Sequence[RoutingStats]) -> None:
        """Count one forward pass."""
        if not stats:
            return
        new = [s.num_tokens_per_expert_E for s in stats]
        self.counts = [a + b for a, b in zip(self.counts, new, strict=True)] if self.counts else new
        dropped = torch.stack([s.num_dropped for s in stats]).sum()
        self.num_dropped = dropped if self.num_dropped is None else self.num_dropped + dropped


def routing_losses(stats: Sequence[RoutingStats], like: Tensor) -> tuple[Tensor, Tensor]:
    """Balance loss and z-loss summed over the layers, already weighted; zeros like `like` for a dense model."""
    if not stats:
        zero = torch.zeros((), device=like.device, dtype=like.dtype)
        return zero, zero
    return (
        torch.stack([s.aux_loss for s in stats]).sum(),
        torch.stack([s.z_loss for s in stats]).sum(),
    )
