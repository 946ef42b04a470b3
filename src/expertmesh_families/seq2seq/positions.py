"""Untied positions: attention scores of positions, separate from those between tokens (TUPE, Ke et al. 2021, arXiv
2006.15595)."""

from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.models.attention import Places
from expertmesh.models.layers import RMSNorm
from expertmesh.moe.dense_parts import Linear


class UntiedPositions(nn.Module):
    """Queries and keys of absolute positions, shared by all layers of an encoder or decoder (eq. 7)."""

    def __init__(self, *, max_len: int, dim: int, num_heads: int, norm_eps: float, **place: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embedding = nn.Embedding(max_len, dim, **place)
        self.norm = RMSNorm(dim, eps=norm_eps, **place)
        self.q = Linear(dim, dim, **place)
        self.k = Linear(dim, dim, **place)

    def forward(self, positions_S: Tensor, num_keys: int) -> Places:
        """Queries (H, S, head_dim) and keys (H, num_keys, head_dim) of positions.

        Args:
            positions_S: (S,) positions of the queries.
            num_keys: number of keys; they have positions 0 ... num_keys - 1.
        """
        keys_K = torch.arange(num_keys, device=positions_S.device)
        queries_SD, keys_KD = (
            matrix(self.norm(self.embedding(places))) for matrix, places in ((self.q, positions_S), (self.k, keys_K))
        )
        return self._heads(queries_SD), self._heads(keys_KD)

    def _heads(self, x_SD: Tensor) -> Tensor:
        result: Tensor = x_SD.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        return result
