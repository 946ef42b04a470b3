"""Stochastic depth that depends on the image, not on the batch: the same on any number of ranks and in any micro-batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.models.keyed import Keyed
from expertmesh.moe.routing_noise import random_bits, uniform

STREAM_DROP_PATH = 17


class DropPath(Keyed):
    """Says which images skip which branches of a model in training (Huang et al. 2016, section 3).

    Args:
        rates: of each branch, the share of the images that skip it, in [0, 1).
    """

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = tuple(rates)

    def forward(self, image_index_B: Tensor) -> Tensor | None:
        """Factors (branches, B) FP32 of every branch's output: 0, or 1 / (1 - rate); None in evaluation, or without rates.

        Args:
            image_index_B: (B,) int64 global image indices.
        """
        if not self.training or not any(self.rates):
            return None
        device = image_index_B.device
        key = self.key_on(device)
        count = len(self.rates)
        bits = random_bits(key, image_index_B, count, layer_index=0, stream=STREAM_DROP_PATH)
        # filled, not copied: a tensor made of the host's numbers would wait for a GPU
        rates_K = torch.stack([torch.full((), rate, device=device) for rate in self.rates])
        keep_BK = uniform(bits, torch.float32) >= rates_K
        return (keep_BK / (1 - rates_K)).T


def scaled(x: Tensor, factor_B: Tensor | None) -> Tensor:
    """(B, ...) times one factor for each image; None: 1."""
    if factor_B is None:
        return x
    return x * factor_B.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
