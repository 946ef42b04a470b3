"""Base of modules with keyed noise; the trainer sets the key before each step."""

import torch
from torch import Tensor, nn

from expertmesh.moe.routing_noise import fresh_key


class Keyed(nn.Module):
    """A module whose noise is a pure function of seed, step and the index of its tokens or images.

    `expertmesh.moe.routing_noise.key_noise` sets seed and step; without it every call draws a fresh key from torch's
    default generator.
    """

    noise_key: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.noise_is_keyed = False
        key = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.register_buffer("noise_key", key, persistent=False)

    def key_on(self, device: torch.device) -> Tensor:
        """Key of this call, (2,) int64."""
        return self.noise_key.to(device) if self.noise_is_keyed else fresh_key(device)
