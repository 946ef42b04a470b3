"""Routers: from a token to scores over experts and the chosen few."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.moe.types import RouterOutput


class TopKRouter(nn.Module):
    """Linear router with top-k choice."""

    def __init__(self, *, dim: int, num_experts: int, device=None, dtype=None) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, num_experts, bias=False, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def forward(self, x_TD: Tensor, top_k: int) -> RouterOutput:
        """Softmax scores, top-k."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits = F.linear(x_TD.to(self.proj.weight.dtype), self.proj.weight)
            scores = logits.softmax(-1)
            weights, ids = scores.topk(top_k, dim=-1)
            if top_k > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            return RouterOutput(ids, weights, scores, logits)
