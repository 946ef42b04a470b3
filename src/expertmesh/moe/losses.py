"""Balance losses and the router z-loss."""

import torch
from torch import Tensor


def switch_loss(scores_TE: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
    """E * sum_e f_e * P_e; 1.0 when uniform (Switch Transformer, eq. 4-6)."""
    num_tokens, num_experts = scores_TE.shape
    p_E = scores_TE.sum(0) / max(num_tokens, 1)
    counts = num_tokens_per_expert_E.to(scores_TE.dtype)
    return num_experts * torch.dot(counts / counts.sum().clamp(min=1), p_E)


def z_loss(logits_TE: Tensor) -> Tensor:
    """mean_t logsumexp(logits_t)^2 (ST-MoE, eq. 5)."""
    return logits_TE.logsumexp(-1).square().sum() / max(logits_TE.shape[0], 1)
