"""Stochastic depth that depends on the image, not on the batch: the same on any number of ranks and in any micro-batch."""

import torch
from torch import Tensor, nn

from expertmesh.moe.random import fresh_key, random_bits, uniform

STREAM_DROP_PATH = 17


class DropPath(nn.Module):
    """Leaves a branch out for a share of the images in training, and scales the others' up (Huang et al. 2016, section 3).

    `expertmesh.moe.random.key_noise` sets seed and step; without it every call draws a fresh key from torch's default generator.

    Args:
        rate: share of the images, in [0, 1).
        site: number that makes the branches of one model differ, below 2^24.
    """

    noise_key: Tensor

    def __init__(self, rate: float, *, site: int) -> None:
        super().__init__()
        self.rate, self.site = rate, site
        self.noise_is_keyed = False
        key = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.register_buffer("noise_key", key, persistent=False)

    def forward(self, x: Tensor, image_index_B: Tensor | None = None) -> Tensor:
        """(B, ...) -> (B, ...).

        Args:
            x: any floating dtype.
            image_index_B: (B,) int64 global image indices; None: 0, 1, 2, ...
        """
        if not self.training or self.rate == 0:
            return x
        if image_index_B is None:
            image_index_B = torch.arange(len(x), device=x.device)
        key = self.noise_key.to(x.device) if self.noise_is_keyed else fresh_key(x.device)
        bits = random_bits(key, image_index_B, 1, layer_index=self.site, stream=STREAM_DROP_PATH)
        keep_B = uniform(bits[:, 0], torch.float32) >= self.rate
        factor_B = keep_B.to(x.dtype) / (1 - self.rate)
        return x * factor_B.view(-1, *[1] * (x.ndim - 1))
