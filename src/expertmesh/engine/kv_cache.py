"""Paged KV cache, and attention of a step's tokens over it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.errors import ConfigError
from expertmesh.ops.attention.paged_attention import paged_attention
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.op_set import OpSet


def num_blocks_of(options: EngineConfig, model: Any, max_len: int, dtype: torch.dtype, *, tp_degree: int) -> int:
    """Number of cache blocks of a rank: the given one, or as many as the longest sequences need and `cache_bytes` hold.

    Args:
        tp_degree: ranks that share the heads.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    size = options.block_size
    block_bytes = model.num_layers * model.cache_numbers * size * dtype.itemsize
    if not model.is_latent:
        block_bytes = -(-block_bytes // tp_degree)
    if options.cache_bytes < block_bytes:
        raise ConfigError(
            "cache_bytes",
            options.cache_bytes,
            f"a block of {size} tokens takes {block_bytes} bytes",
            "give more, or a smaller block_size",
        )
    return min(options.max_sequences * -(-max_len // size), options.cache_bytes // block_bytes)


class PagedCache:
    """Paged KV cache of all layers, with num_blocks blocks of block_size tokens; keys and values are one allocation
    each."""

    def __init__(
        self,
        config: Any,  # configuration of the model; num_layers, cache_heads, cache_size and is_latent are read
        *,
        num_parts: int = 1,  # ranks that share the heads; latent attention has one, which each rank keeps
        has_spare: bool = False,  # whether there is a block more, behind the others, that padding writes to
        num_blocks: int,
        block_size: int,  # tokens of a block
        device: torch.device,
        dtype: torch.dtype,  # dtype of keys and values, the model's compute dtype
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        heads = config.cache_heads if config.is_latent else config.cache_heads // num_parts
        self.num_pages = num_blocks + has_spare
        shape = (config.num_layers, self.num_pages * block_size, heads, config.cache_size)
        try:
            self.k = torch.zeros(shape, device=device, dtype=dtype)
            # latent attention caches one vector per token, as key and value
            self.v = self.k if config.is_latent else torch.zeros_like(self.k)
            self._layers = tuple(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        except RuntimeError as error:  # the allocator's message has several lines
            raise ConfigError(
                "num_blocks",
                num_blocks,
                f"the device has no memory for as many blocks of {block_size} tokens",
                "use fewer",
            ) from error

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """Allocations of the cache."""
        return (self.k,) if self.v is self.k else (self.k, self.v)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in order."""
        size = self.block_size
        for source, target in pairs:
            for memory in self.memories:
                memory[:, target * size : (target + 1) * size] = memory[:, source * size : (source + 1) * size]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(slots, heads, d) keys and values of a layer."""
        return self._layers[index]


@dataclass(frozen=True)
class PagedContext:
    """Attention context of a step on the paged cache: an `expertmesh.models.attention.AttentionContext`."""

    cache: PagedCache  # KV cache, to which the step's keys and values are written
    positions: Tensor  # (T,) position of each token in its sequence
    slots_T: Tensor  # (T,) cache slot of each token
    keys: PagedKeys  # rows and blocks of the step's sequences
    keeps: bool = True  # whether keys and values are stored for later tokens

    def attend(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_Thd: Tensor,
        v_Thd: Tensor,
        *,
        arithmetic: OpSet,
        rule: ScoreRule | None = None,
    ) -> Tensor:
        """Attention of the step's tokens, each sequence on its own; see `AttentionContext.attend`."""
        k_all, v_all = self.cache.layer(layer_index)
        k_all.index_copy_(0, self.slots_T, k_Thd.to(k_all.dtype))
        if self.cache.v is not self.cache.k:
            v_all.index_copy_(0, self.slots_T, v_Thd.to(v_all.dtype))
        pages = self.cache.num_pages, self.cache.block_size
        y_THd = paged_attention(
            q_THd.to(k_all.dtype),  # under autocast, norms and rotations give another type
            k_all.unflatten(0, pages),
            v_all.unflatten(0, pages),
            self.keys,
            PLAIN if rule is None else rule,
            attention=arithmetic.attention,
            is_invariant=arithmetic.batch_invariant,
        )
        return y_THd.flatten(1).to(q_THd.dtype)
