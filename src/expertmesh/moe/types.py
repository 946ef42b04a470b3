"""What passes between the stages of the layer: route -> assign -> dispatch -> experts -> combine."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """A choice of experts to replay (activation recomputation, RL rollouts).

    Attributes:
        expert_ids_TK: (T, K) integer expert ids, before any capacity is applied.
        weights_TK: (T, K) routing weights, or None: recomputed from the scores at these ids.
    """

    expert_ids_TK: Tensor
    weights_TK: Tensor | None = None


@dataclass(frozen=True)
class RouterOutput:
    """What a router says of T tokens.

    Attributes:
        topk_expert_ids_TK: (T, K) int64 in [0, E]; E means "no expert" (expert-choice routing uses K = E slots
            and leaves those of experts that did not choose the token empty).
        topk_weights_TK: (T, K) routing weights, FP32 (FP64 for FP64 input), differentiable.
        scores_TE: (T, E) the clean scores over all experts that the balance loss uses, differentiable.
        logits_TE: (T, E) the logits that the z-loss uses, differentiable.
    """

    topk_expert_ids_TK: Tensor
    topk_weights_TK: Tensor
    scores_TE: Tensor
    logits_TE: Tensor


@dataclass(frozen=True)
class RoutingStats:
    """What one call of a MoE layer tells beside its output; a pytree.

    Attributes:
        aux_loss: scalar, weighted balance loss, differentiable; add it to the training loss.
        z_loss: scalar, weighted router z-loss, differentiable; add it to the training loss.
        num_tokens_per_expert_E: (E,) int64, rows chosen per expert before dropping, detached.
        num_dropped: scalar int64, rows dropped because an expert was over capacity, detached.
        topk_expert_ids_TK: (T, K) int64 expert ids before dropping, detached.
        topk_weights_TK: (T, K) routing weights before dropping, detached.
    """

    aux_loss: Tensor
    z_loss: Tensor
    num_tokens_per_expert_E: Tensor
    num_dropped: Tensor
    topk_expert_ids_TK: Tensor
    topk_weights_TK: Tensor


for _cls, _fields in (
    (Routing, ["expert_ids_TK", "weights_TK"]),
    (RouterOutput, ["topk_expert_ids_TK", "topk_weights_TK", "scores_TE", "logits_TE"]),
    (
        RoutingStats,
        [
            "aux_loss",
            "z_loss",
            "num_tokens_per_expert_E",
            "num_dropped",
            "topk_expert_ids_TK",
            "topk_weights_TK",
        ],
    ),
):
    torch.utils._pytree.register_dataclass(_cls, field_names=_fields, drop_field_names=[])
