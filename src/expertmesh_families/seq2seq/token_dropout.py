"""Dropout keyed by token index: the same on any number of ranks and in any micro-batch."""

import torch
from torch import Tensor

from expertmesh.models.keyed import Keyed
from expertmesh.moe.routing_noise import random_bits

STREAM_DROPOUT = 16
_GOLDEN = 0x9E3779B1 - 2**32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32


class TokenDropout(Keyed):
    """Inverted dropout of the elements of every token in training (Srivastava et al. 2014, 10).

    The mask is a pure function of (seed, step, site, token index, column). One Philox word per token is mixed with the index
    of every fourth column by a 32-bit integer hash, whose four bytes decide about four columns. On a CPU this takes no longer
    than drawing random numbers.

    Args:
        rate: dropout rate, in [0, 1), rounded to a 256th.
        site: number that distinguishes the dropouts of one model, below 2^24.
    """

    def __init__(self, rate: float, *, site: int) -> None:
        super().__init__()
        self.site = site
        self._threshold = min(round(rate * 256), 255)

    def forward(self, x: Tensor, token_index_T: Tensor | None = None) -> Tensor:
        """Apply dropout to T tokens.

        Args:
            x: (..., D) with T tokens in its leading axes, any floating dtype.
            token_index_T: (T,) int64 global token indices; None: 0, 1, 2, ...
        """
        if not self.training or self._threshold == 0:
            return x
        if token_index_T is None:
            token_index_T = torch.arange(x[..., 0].numel(), device=x.device)
        bytes_TD = _bytes(self.key_on(x.device), token_index_T, x.shape[-1], site=self.site)
        keep_TD = (bytes_TD >= self._threshold).view_as(x)
        return x * (keep_TD.to(x.dtype) * (256 / (256 - self._threshold)))


def _bytes(noise_key: Tensor, token_index_T: Tensor, num_columns: int, *, site: int) -> Tensor:
    """Uniform random bytes, (T, D) uint8."""
    words_T1 = random_bits(noise_key, token_index_T, 1, layer_index=site, stream=STREAM_DROPOUT)
    columns = torch.arange(-(-num_columns // 4), device=words_T1.device, dtype=torch.int32)
    # Wellons' lowbias32 in 32-bit integers, which wrap; right shifts keep the sign, so its bits are masked
    x = words_T1.to(torch.int32) ^ (columns * _GOLDEN)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.view(torch.uint8)[:, :num_columns]
