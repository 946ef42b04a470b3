"""What the routers of a model add to its training loss, and what they did."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from expertmesh.moe.types import RoutingStats


@dataclass
class LoadCounter:
    """Routing statistics summed over the micro-batches of a step; no synchronisation.

    Attributes:
        watches: whether weights and entropies are summed, too.
        counts: (E,) int64 rows chosen per expert, one tensor per MoE layer.
        num_dropped: (number of MoE layers,) int64 rows dropped.
        weights: (E + 2,) FP64 per MoE layer: this process's sums of the routing weights of each expert's rows, of the
            tokens' routing entropies in nats, and the tokens.
    """

    watches: bool = False
    counts: list[Tensor] = field(default_factory=list)
    num_dropped: Tensor | None = None
    weights: list[Tensor] = field(default_factory=list)

    def add(self, stats: Sequence[RoutingStats]) -> None:
        """Count one forward pass."""
        if not stats:
            return
        self.counts = _added(self.counts, [s.num_tokens_per_expert_E for s in stats])
        dropped = torch.stack([s.num_dropped for s in stats])
        self.num_dropped = dropped if self.num_dropped is None else self.num_dropped + dropped
        if self.watches:
            self.weights = _added(self.weights, [_sums_of_weights(s) for s in stats])


def _added(sums: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(sums, new, strict=True)] if sums else new


def _sums_of_weights(stats: RoutingStats) -> Tensor:
    """See `LoadCounter.weights`; the entropy is that of a token's weights over their sum."""
    num_experts = stats.num_tokens_per_expert_E.numel()
    weights_TK, ids_TK = stats.topk_weights_TK, stats.topk_expert_ids_TK
    sums = torch.zeros(num_experts + 1, dtype=torch.float64, device=weights_TK.device)
    sums.index_add_(0, ids_TK.reshape(-1), weights_TK.reshape(-1).double())
    shares_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(1e-30)
    entropy = -torch.xlogy(shares_TK, shares_TK).sum()
    is_routed_T = (ids_TK < num_experts).any(1)
    return torch.cat((sums[:-1], torch.stack((entropy, is_routed_T.sum())).double()))


def routing_losses(stats: Sequence[RoutingStats], like: Tensor) -> tuple[Tensor, Tensor]:
    """Balance loss and z-loss summed over the layers, already weighted; zeros like `like` for a dense model."""
    if not stats:
        zero = torch.zeros((), device=like.device, dtype=like.dtype)
        return zero, zero
    return (
        torch.stack([s.aux_loss for s in stats]).sum(),
        torch.stack([s.z_loss for s in stats]).sum(),
    )
