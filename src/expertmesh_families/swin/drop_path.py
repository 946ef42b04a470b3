"""Stochastic depth keyed by image index: the same on any number of ranks and in any micro-batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.moe.keyed import Keyed
from expertmesh.moe.routing_noise import random_bits, uniform

STREAM_DROP_PATH = 17


class DropPath(Keyed):
    """Stochastic depth: random choice of the branches that each image skips in training (Huang et al. 2016, section 3).

    Args:
        rates: drop rate of each branch, in [0, 1).
    """

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = tuple(rates)

    def forward(self, image_index_B: Tensor) -> Tensor | None:
        """Factors (branches, B) FP32 of the branches' outputs: 0 or 1 / (1 - rate). None in evaluation or if all rates
        are 0.

        Args:
            image_index_B: (B,) int64 global image indices.
        """
        if not self.training or not any(self.rates):
            return None
        device = image_index_B.device
        key = self.key_on(device)
        count = len(self.rates)
        bits = random_bits(key, image_index_B, count, layer_index=0, stream=STREAM_DROP_PATH)
        # filled on the device, because a copy from the host would synchronise with a GPU
        rates_K = torch.stack([torch.full((), rate, device=device) for rate in self.rates])
        keep_BK = uniform(bits, torch.float32) >= rates_K
        return (keep_BK / (1 - rates_K)).T


def scaled(x: Tensor, factor_B: Tensor | None) -> Tensor:
    """Product of x, (B, ...), with one factor per image; None: x."""
    if factor_B is None:
        return x
    return x * factor_B.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
