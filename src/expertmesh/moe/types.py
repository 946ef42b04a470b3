"""What passes between the stages of the layer: route -> assign -> dispatch -> experts -> combine."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Which experts compute which tokens, and with which weights: what stages of the layer hand on, and what a call may be given to replay.

    Attributes:
        expert_ids_TK: (T, K) integer expert ids in [0, E]; E means "no expert": masked, dropped for a capacity, or (expert-choice
            routing uses K = E slots) not chosen. Of a choice to replay: before any capacity is applied.
        weights_TK: (T, K) routing weights, FP32 (FP64 for FP64 input), differentiable. Of a choice to replay: used as they are (no
            normalisation, no scale), or None: recomputed from the router's scores at these ids, so that the router gets its gradient.
        scores_TE: (T, E) scores for the balance loss, see `RouterOutput`; not read where a choice is replayed. So are all that follow.
        logits_TE: (T, E) logits for the z-loss.
        load_TE: (T, E) see `RouterOutput`.
        num_dropped: scalar int64, choices dropped for a capacity; None before it was applied.
        max_rows: a bound on the ids below E that depends on sizes only; None: none better than T * K.

    Example:
        >>> import torch
        >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2)
        >>> x = torch.randn(5, 8)
        >>> y, stats = layer(x)
        >>> replayed, _ = layer(x, routing=em.Routing(stats.topk_expert_ids_TK))
        >>> torch.equal(y, replayed)
        True
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor | None = None
    scores_TE: Tensor | None = None
    logits_TE: Tensor | None = None
    load_TE: Tensor | None = None
    num_dropped: Tensor | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class RouterOutput:
    """What a router of the user's may say of T tokens instead of giving logits.

    Attributes:
        topk_expert_ids_TK: (T, K) int64 in [0, E]; E means "no expert" (expert-choice routing uses K = E slots
            and leaves those of experts that did not choose the token empty).
        topk_weights_TK: (T, K) routing weights, FP32 (FP64 for FP64 input), differentiable.
        scores_TE: (T, E) the clean scores over all experts that the balance loss uses, differentiable, summing to
            1 per token; None: this router has nothing to balance, and the balance loss is 0.
        logits_TE: (T, E) the logits that the z-loss uses, differentiable; None: the z-loss is 0.
        load_TE: (T, E) probability that the expert is among the token's choices when its noise is drawn anew,
            differentiable; None: the load half of the importance+load loss counts the choices made.
    """

    topk_expert_ids_TK: Tensor
    topk_weights_TK: Tensor
    scores_TE: Tensor | None = None
    logits_TE: Tensor | None = None
    load_TE: Tensor | None = None


@dataclass(frozen=True)
class RoutingStats:
    """What one call of a MoE layer tells beside its output; a pytree.

    Attributes:
        aux_loss: scalar, weighted balance loss, differentiable; add it to the training loss. Of a call with losses=False
            this and the two that follow have no element.
        z_loss: scalar, weighted router z-loss, differentiable; add it to the training loss.
        num_tokens_per_expert_E: (E,) int64, rows chosen per expert before dropping, detached.
        num_dropped: scalar int64, rows dropped because an expert was over capacity, detached.
        topk_expert_ids_TK: (T, K) int64 expert ids before dropping, detached; E at masked tokens.
        topk_weights_TK: (T, K) routing weights before dropping, detached; 0 at masked tokens.
        kept_expert_ids_TK: (T, K) int64 expert ids after dropping, detached; E at dropped rows, too.
        balance_sums_RE: (R, E) FP64 sums of this call over all processes that a balance loss over the batch goes on from,
            detached; None: its scope is not global, or it has no weight.

    Example:
        >>> import torch
        >>> layer = em.MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2)
        >>> y, stats = layer(torch.randn(5, 8))
        >>> isinstance(stats, em.RoutingStats), stats.num_tokens_per_expert_E.sum().item()
        (True, 10)
        >>> (y.square().mean() + stats.aux_loss + stats.z_loss).backward()
    """

    aux_loss: Tensor
    z_loss: Tensor
    num_tokens_per_expert_E: Tensor
    num_dropped: Tensor
    topk_expert_ids_TK: Tensor
    topk_weights_TK: Tensor
    kept_expert_ids_TK: Tensor
    balance_sums_RE: Tensor | None = None


for _cls in (Routing, RouterOutput, RoutingStats):
    # Public, and it makes the classes pytrees for torch.compile, checkpointing and export alike.
    torch.export.register_dataclass(_cls, serialized_type_name=f"expertmesh.{_cls.__name__}")
