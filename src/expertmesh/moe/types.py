"""Data passed between the stages of the layer: route -> assign -> dispatch -> experts -> combine."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Expert ids and routing weights of a call's tokens. The stages of the layer pass it on, and a call can replay one.

    Attributes:
        expert_ids_TK: (T, K) integer expert ids in [0, E]; E means "no expert": masked, dropped for a capacity, or
            (expert-choice routing uses K = E slots) not chosen. A choice to replay has the ids before any capacity.
        weights_TK: (T, K) routing weights, FP32 (FP64 for FP64 input), differentiable. In a choice to replay they are
            used as they are (no normalisation, no scale); None: recomputed from the router's scores at these ids, so
            that the router gets its gradient.
        scores_TE: (T, E) scores for the balance loss, see `RouterOutput`. A replay does not read this field and those
            after it.
        logits_TE: (T, E) logits for the z-loss.
        load_TE: (T, E) probability of being chosen, see `RouterOutput`.
        num_dropped: scalar int64, choices dropped by the capacity; None before it is applied.
        max_rows: upper bound on the number of ids below E that depends on sizes only; None: T * K.

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
    """Choices and weights for T tokens that a custom router may return instead of logits.

    Attributes:
        topk_expert_ids_TK: (T, K) int64 in [0, E]; E means "no expert". (Expert-choice routing uses K = E slots; slot e
            is E if expert e did not choose the token.)
        scores_TE: (T, E) clean scores over all experts for the balance loss, differentiable, summing to 1 per token;
            None: the balance loss is 0.
        load_TE: (T, E) probability that the expert is among the token's choices when its noise is drawn anew,
            differentiable; None: the load half of the importance+load loss counts the choices made.
    """

    topk_expert_ids_TK: Tensor
    topk_weights_TK: Tensor  # (T, K) routing weights, FP32 (FP64 for FP64 input), differentiable
    scores_TE: Tensor | None = None
    logits_TE: Tensor | None = None  # (T, E) logits for the z-loss, differentiable; None: the z-loss is 0
    load_TE: Tensor | None = None


@dataclass(frozen=True)
class RoutingStats:
    """Routing statistics and losses of one call of a MoE layer; a pytree.

    Attributes:
        aux_loss: scalar, weighted balance loss, differentiable; add it to the training loss. With losses=False this
            tensor and the next two have no element.
        z_loss: scalar, weighted router z-loss, differentiable; add it to the training loss.
        num_tokens_per_expert_E: (E,) int64, rows chosen per expert before dropping, detached.
        num_dropped: scalar int64, rows dropped because an expert was over capacity, detached.
        topk_expert_ids_TK: (T, K) int64 expert ids before dropping, detached; E at masked tokens.
        topk_weights_TK: (T, K) routing weights before dropping, detached; 0 at masked tokens.
        kept_expert_ids_TK: (T, K) int64 expert ids after dropping, detached; E at dropped rows, too.
        balance_sums_RE: (R, E) FP64 sums of this call over all processes for the global balance loss of later
            micro-batches, detached; None: the loss's scope is not global, or its weight is 0.

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
    # A public function; it makes the classes pytrees for torch.compile, checkpointing and export alike.
    torch.export.register_dataclass(_cls, serialized_type_name=f"expertmesh.{_cls.__name__}")
