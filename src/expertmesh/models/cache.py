"""A preallocated, dense key-value cache."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.config.values import Number
from expertmesh.errors import ConfigError
from expertmesh.models.attention import DenseContext
from expertmesh.ops.check import IDS, WHOLE, Arg, check_device, check_tensor

_SIZE = Number(0, fix="give a number of rows, and of tokens", types=WHOLE)
_ROWS = Arg(
    "B",
    IDS,
    "the old index of each new row",
    below="old",
    fix="give such indices, as mask.nonzero()[:, 0] has them",
)


class KVCache:
    """Keys and values of every layer for up to `max_len` tokens per sequence, in one allocation each.

    With latent attention there is one allocation, because a single vector per token is both key and value.

    The model announces new tokens once with `begin`, then every layer stores its keys and values with `update`.
    """

    def __init__(
        self,
        config: Any,
        *,
        batch_size: int,  # number of sequences
        max_len: int | None = None,  # maximum tokens per sequence, padding included; None: config.max_seq_len
        device: torch.device | str | None = None,  # the device of the cache
        dtype: torch.dtype | None = None,  # dtype of keys and values, the model's compute dtype
    ) -> None:
        """Allocate the cache."""
        max_len = config.max_seq_len if max_len is None else max_len
        for name, size in (("batch_size", batch_size), ("max_len", max_len)):
            _SIZE.check(name, size)
        if max_len > config.max_seq_len:
            raise ConfigError(
                f"max_len={max_len}: a cache longer than the model's max_seq_len={config.max_seq_len};"
                " ask for fewer tokens"
            )
        shape = (config.num_layers, batch_size, config.cache_heads, max_len, config.cache_size)
        self.max_len = max_len
        self.length = 0  # tokens of every sequence stored so far, padding included
        self._start = 0
        self._k = torch.zeros(shape, device=device, dtype=dtype)
        self._v = self._k if config.is_latent else torch.zeros_like(self._k)
        self._is_token_BS: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self._k.shape[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(layers, sequences, kv_heads, max_len, head_size)."""
        return tuple(self._k.shape)

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self._k.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self._k.dtype

    def check_new(self, ids_BS: Tensor) -> None:
        """Check batch size, device and remaining room for new tokens."""
        B, S = ids_BS.shape
        if self.batch_size != B:
            raise ConfigError(
                f"cache holds {self.batch_size} sequences and ids_BS has {B}; they must be as many; make another one "
                f"with new_cache(batch_size={B}, ...)"
            )
        fix = "make one where the model is, with its new_cache()"
        check_device("cache", self, ids_BS.device, of="ids_BS", fix=fix)
        if self.length + S > self.max_len:
            raise ConfigError(
                f"{self.length + S} tokens: the cache holds {self.max_len}; make a longer cache or ask for fewer tokens"
            )

    def select(self, rows_B: Tensor) -> None:
        """Reorder the rows: row i becomes a copy of the old row rows_B[i]."""
        check_tensor("rows_B", rows_B, _ROWS, {"old": self.batch_size})
        seen = self.length
        shape = (self._k.shape[0], len(rows_B), *self._k.shape[2:])
        is_smaller_or_larger = len(rows_B) != self.batch_size

        def selected(old: Tensor) -> Tensor:
            new = old.new_zeros(shape) if is_smaller_or_larger else old
            new[:, :, :, :seen] = old[:, rows_B, :, :seen]
            return new

        is_one = self._v is self._k
        self._k = selected(self._k)
        self._v = self._k if is_one else selected(self._v)
        if self._is_token_BS is not None:
            self._is_token_BS = self._is_token_BS[rows_B]

    def begin(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, counts_padding: bool = True) -> DenseContext:
        """Make room for new tokens. Does not synchronise with the device.

        Args:
            ids_BS: (B, S) the new tokens; only the shape and the device matter.
            token_mask_BS: (B, S) bool, False for padding, which later tokens do not see.
            counts_padding: whether positions are columns of the batch; see `DenseContext.of`.
        """
        B, S = ids_BS.shape
        self.check_new(ids_BS)
        self._start, end = self.length, self.length + S
        self.length = end
        device = ids_BS.device
        if token_mask_BS is not None and self._is_token_BS is None:
            self._is_token_BS = torch.ones(B, self.max_len, dtype=torch.bool, device=device)
        is_token_BL = None
        if self._is_token_BS is not None:
            if token_mask_BS is not None:
                self._is_token_BS[:, self._start : end] = token_mask_BS
            is_token_BL = self._is_token_BS[:, :end]
        return DenseContext.of(
            S,
            num_seen=self._start,
            device=device,
            is_token_BL=is_token_BL,
            cache=self,
            counts_padding=counts_padding,
        )

    def update(self, layer_index: int, *, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values of the tokens announced by `begin`.

        Args:
            layer_index: index of the layer, from 0.
            k_BHSD: (B, kv_heads, S, head_size), rotated keys.
            v_BHSD: values, of the same shape; with latent attention the keys, which are stored once.

        Returns:
            Keys and values of all tokens so far: views of the cache, (B, kv_heads, length, head_size).
        """
        k, v = self._k[layer_index], self._v[layer_index]
        k[:, :, self._start : self.length] = k_BHSD
        if self._v is not self._k:
            v[:, :, self._start : self.length] = v_BHSD
        return k[:, :, : self.length], v[:, :, : self.length]
