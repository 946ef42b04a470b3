"""Dropout keyed by token index: the same on any number of ranks and in any micro-batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.moe.keyed import Keyed
from expertmesh.moe.routing_noise import first_index, random_bits

STREAM_DROPOUT = 16
STREAM_ADAPTERS = 17
_GOLDEN = 0x9E3779B1 - 2**32
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32


class TokenDropout(Keyed):
    """Inverted dropout of the elements of every token in training (Srivastava et al. 2014, 10).

    The mask is a pure function of (seed, step, site, token index, column). One Philox word per token is mixed with the
    index of every fourth column by a 32-bit integer hash, whose four bytes decide about four columns. On a CPU this
    takes no longer than drawing random numbers.

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
        call = self.key_on(x.device), token_index_T, x.shape[-1]
        bytes_TD = _words(*call, site=self.site, stream=STREAM_DROPOUT).view(torch.uint8)
        bytes_TD = bytes_TD[:, : x.shape[-1]]
        keep_TD = (bytes_TD >= self._threshold).view_as(x)
        return x * (keep_TD.to(x.dtype) * (256 / (256 - self._threshold)))


class TokenPlaces:
    """Hook of a model's calls that keeps the indices of their tokens for the dropout of its adapters.

    A call without `token_index` counts its tokens from the sample that `count_tokens_from` set.
    """

    def __init__(self) -> None:
        self.token_index: Tensor | None = None
        self.rows_R: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Keep the indices and the rows of a call's head."""
        self.token_index = kwargs.get("token_index")
        self.rows_R = kwargs.get("logit_rows_R")

    def indices(self, num_rows: int, samples: Tensor, *, of_head: bool) -> Tensor:
        """Indices (T,) int64 of a module's rows."""
        if self.token_index is not None:
            index_T = self.token_index.flatten()
            return index_T if self.rows_R is None or not of_head else index_T[self.rows_R]
        if self.rows_R is not None and of_head:
            return self.rows_R
        return torch.arange(num_rows, device=samples.device) + first_index(num_rows, samples)


class AdapterDropout(Keyed):
    """Inverted dropout of the input of a low-rank adapter in training, as peft's `lora_dropout`.

    The mask is a pure function of (seed, step, site, token index, column).

    Args:
        rate: dropout rate, in [0, 1), rounded to a 65536th.
        site: number of the adapter in its model, below 2^24.
    """

    noise_samples: Tensor

    def __init__(self, rate: float, *, site: int, places: TokenPlaces, of_head: bool) -> None:
        super().__init__()
        self.rate, self.site, self.places, self.of_head = rate, site, places, of_head
        self._threshold = min(round(rate * 65536), 65535)
        samples = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.register_buffer("noise_samples", samples, persistent=False)

    def reset(self) -> None:
        """Forget keys and samples, which allocation leaves undefined."""
        self.noise_is_keyed = False
        self.noise_samples.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to T tokens, (..., K) with the tokens in its leading axes, any floating dtype."""
        if not self.training or self._threshold == 0:
            return x
        samples = self.noise_samples.to(x.device)
        index_T = self.places.indices(x[..., 0].numel(), samples, of_head=self.of_head)
        call = self.key_on(x.device), index_T, 2 * x.shape[-1]
        halves_TK = _words(*call, site=self.site, stream=STREAM_ADAPTERS).view(torch.int16)
        drop_TK = halves_TK[:, : x.shape[-1]] < self._threshold - 32768
        return x.masked_fill(drop_TK.view_as(x), 0) * (65536 / (65536 - self._threshold))


def _words(noise_key: Tensor, token_index_T: Tensor, num_bytes: int, *, site: int, stream: int) -> Tensor:
    """Uniform 32-bit words, (T, W) int32, with at least `num_bytes` bytes per token."""
    words_T1 = random_bits(noise_key, token_index_T, 1, layer_index=site, stream=stream)
    columns = torch.arange(-(-num_bytes // 4), device=words_T1.device, dtype=torch.int32)
    # Wellons' lowbias32 in 32-bit integers, which wrap; right shifts keep the sign, so its bits are masked
    x = words_T1.to(torch.int32) ^ (columns * _GOLDEN)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
