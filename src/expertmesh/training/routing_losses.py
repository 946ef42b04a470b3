"""Routing losses of a model, and counters of its routing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from expertmesh.moe.types import RoutingStats

POSITIONS = 8
"""Number of equal parts of a sample for which dropped rows are counted."""


@dataclass(frozen=True)
class Watched:
    """Samples and kinds of the tokens of a forward pass, for recorded statistics."""

    num_samples: int  # samples of the pass; its tokens are in their order
    part: int = 0  # index of this process's part of every sample's tokens, among `num_parts`
    num_parts: int = 1  # number of processes that share each sample
    num_labels: int = 0  # number of kinds of samples
    label_B: Tensor | None = None  # (B,) kind of each sample; None: no kinds


@dataclass
class LoadCounter:
    """Routing statistics summed over the micro-batches of a step, without synchronizing.

    Attributes:
        watched: one FP64 vector per MoE layer with this process's sums, concatenated: (E,) routing weights of each
            expert's rows; the tokens' routing entropies in nats; the number of tokens; (POSITIONS, 2) rows dropped and
            rows chosen in each part of a sample; (labels, E) rows chosen per expert by samples of each kind. Empty if
            nothing was watched.
    """

    counts: list[Tensor] = field(default_factory=list)  # (E,) int64 rows chosen per expert, one tensor per MoE layer
    num_dropped: Tensor | None = None  # (number of MoE layers,) int64 rows dropped
    watched: list[Tensor] = field(default_factory=list)

    def add(self, stats: Sequence[RoutingStats], watched: Watched | None = None) -> None:
        """Add the statistics of one forward pass."""
        if not stats:
            return
        self.counts = _added(self.counts, [s.num_tokens_per_expert_E for s in stats])
        dropped = torch.stack([s.num_dropped for s in stats])
        self.num_dropped = dropped if self.num_dropped is None else self.num_dropped + dropped
        if watched is not None:
            sums = [torch.cat((_sums_of_weights(s), _drops(s, watched), _use_by_label(s, watched))) for s in stats]
            self.watched = _added(self.watched, sums)


def _added(sums: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(sums, new, strict=True)] if sums else new


def _sums_of_weights(stats: RoutingStats) -> Tensor:
    """(E + 2,) of `LoadCounter.watched`; the entropy is of a token's weights divided by their sum."""
    num_experts = stats.num_tokens_per_expert_E.numel()
    weights_TK, ids_TK = stats.topk_weights_TK, stats.topk_expert_ids_TK
    sums = torch.zeros(num_experts + 1, dtype=torch.float64, device=weights_TK.device)
    sums.index_add_(0, ids_TK.reshape(-1), weights_TK.reshape(-1).double())
    shares_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(1e-30)
    entropy = -torch.xlogy(shares_TK, shares_TK).sum()
    is_routed_T = (ids_TK < num_experts).any(1)
    return torch.cat((sums[:-1], torch.stack((entropy, is_routed_T.sum())).double()))


def _drops(stats: RoutingStats, watched: Watched) -> Tensor:
    """(POSITIONS * 2,) of `LoadCounter.watched`; zeros if nothing is dropped, or a layer's tokens are not parts of
    samples."""
    num_experts, ids_TK = stats.num_tokens_per_expert_E.numel(), stats.topk_expert_ids_TK
    sums = torch.zeros(POSITIONS, 2, dtype=torch.float64, device=ids_TK.device)
    each, rest = divmod(len(ids_TK), watched.num_samples)
    if stats.kept_expert_ids_TK is ids_TK or rest or not each:
        return sums.flatten()
    place_S = torch.arange(each, device=ids_TK.device) + watched.part * each
    bin_S = place_S * POSITIONS // (each * watched.num_parts)
    chosen_TK = ids_TK < num_experts
    dropped_TK = chosen_TK & (stats.kept_expert_ids_TK == num_experts)
    rows_T2 = torch.stack((dropped_TK.sum(1), chosen_TK.sum(1)), 1).double()
    return sums.index_add_(0, bin_S.repeat(watched.num_samples), rows_T2).flatten()


def _use_by_label(stats: RoutingStats, watched: Watched) -> Tensor:
    """(labels * E,) of `LoadCounter.watched`."""
    num_experts, ids_TK = stats.num_tokens_per_expert_E.numel(), stats.topk_expert_ids_TK
    sums = torch.zeros(watched.num_labels, num_experts + 1, dtype=torch.float64, device=ids_TK.device)
    each, rest = divmod(len(ids_TK), watched.num_samples)
    if watched.label_B is not None and not rest:
        slots_TK = watched.label_B.repeat_interleave(each)[:, None] * (num_experts + 1) + ids_TK
        ones = torch.ones(ids_TK.numel(), dtype=torch.float64, device=ids_TK.device)
        sums.view(-1).index_add_(0, slots_TK.flatten(), ones)
    return sums[:, :-1].flatten()


def routing_losses(
    stats: Sequence[RoutingStats], like: Tensor, shares: Sequence[float] = (1.0,)
) -> tuple[Tensor, Tensor]:
    """Weighted balance loss and z-loss, summed over the layers; zeros for a dense model.

    Args:
        like: tensor whose device and dtype zeros have.
        shares: share of the tokens in this pass, among those that the losses are means over; one per layer, or one for
            all.
    """
    if not stats:
        zero = torch.zeros((), device=like.device, dtype=like.dtype)
        return zero, zero
    each = shares if len(shares) > 1 else [*shares] * len(stats)
    return (
        torch.stack([s.aux_loss * share for s, share in zip(stats, each, strict=True)]).sum(),
        torch.stack([s.z_loss * share for s, share in zip(stats, each, strict=True)]).sum(),
    )
