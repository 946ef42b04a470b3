"""Paged KV cache, and attention of a step's tokens over it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.engine import EngineConfig
from expertmesh.errors import ConfigError
from expertmesh.ops.attention import blockwise
from expertmesh.ops.attention.fixed_blocks import BLOCK_KEYS, one_query_attention
from expertmesh.ops.attention.scores import PLAIN, ScoreRule
from expertmesh.ops.attention.visible import Visible, visible
from expertmesh.ops.op_set import OpSet


def num_blocks_of(
    options: EngineConfig, model: Any, max_len: int, dtype: torch.dtype, *, tp_degree: int
) -> int:
    """Number of cache blocks of a rank: the given one, or as many as the longest sequences need and `cache_bytes` hold.

    Args:
        options: options of the engine.
        model: configuration of the model; num_layers, cache_numbers and is_latent are read.
        max_len: maximum tokens of a sequence.
        dtype: dtype of keys and values.
        tp_degree: ranks that share the heads.

    Raises:
        ConfigError: `cache_bytes` hold no block.
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
    each.

    Args:
        config: configuration of the model; num_layers, cache_heads, cache_size and is_latent are read.
        num_blocks: number of blocks.
        block_size: tokens of a block.
        device: device of the cache.
        dtype: dtype of keys and values, the model's compute dtype.
        num_parts: ranks that share the heads; latent attention has one, which each rank keeps.

    Raises:
        ConfigError: the device has no memory for as many blocks.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_parts: int = 1,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        heads = config.cache_heads if config.is_latent else config.cache_heads // num_parts
        shape = (config.num_layers, num_blocks * block_size, heads, config.cache_size)
        try:
            self.k = torch.zeros(shape, device=device, dtype=dtype)
            # latent attention caches one vector per token, as key and value
            self.v = self.k if config.is_latent else torch.zeros_like(self.k)
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
                memory[:, target * size : (target + 1) * size] = memory[
                    :, source * size : (source + 1) * size
                ]

    def places(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Cache slots of the tokens start ... stop - 1 of a sequence with this block table."""
        size = self.block_size
        return [blocks[i // size] * size + i % size for i in range(start, stop)]


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a step.

    Attributes:
        first: index of its first row.
        count: number of rows, the last tokens of the sequence.
        num_keys: number of keys that the last row sees.
        places_L: (num_keys,) cache slots of its keys; None: contiguous.
        pieces_L: (1, heads, num_keys, d) views of keys and of values per layer, if contiguous.
        seen: keys that each row sees, the same in all layers.
    """

    first: int
    count: int
    num_keys: int
    places_L: Tensor | None
    pieces_L: tuple[Sequence[Tensor], ...] | None
    seen: Visible


@dataclass(frozen=True)
class Ones:
    """Sequences with one row each and similar numbers of keys, which batch-invariant attention computes together.

    Attributes:
        rows: (B,) row of each sequence.
        num_keys: number of keys of each sequence.
        places_BL: (B, L) cache slots of the keys, padded with the slot of the last key.
        masks: visible keys by window and chunk, created on first use.
    """

    rows: Tensor
    num_keys: tuple[int, ...]
    places_BL: Tensor
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)

    def mask(self, rule: ScoreRule) -> Tensor:
        """(B, L) bool mask of visible keys."""
        found = self.masks.get((rule.window, rule.chunk))
        if found is None:
            device = self.places_BL.device
            bounds = [(rule.first_seen(num - 1), num) for num in self.num_keys]
            first_B1, stop_B1 = torch.tensor(bounds, device=device).T[..., None]
            keys_L = torch.arange(self.places_BL.shape[1], device=device)
            found = (keys_L >= first_B1) & (keys_L < stop_B1)
            self.masks[rule.window, rule.chunk] = found
        return found


@dataclass(frozen=True)
class PagedContext:
    """Attention context of a step on the paged cache: an `expertmesh.models.attention.AttentionContext`.

    Attributes:
        cache: KV cache, to which the step's keys and values are written.
        positions: (T,) position of each token in its sequence.
        places_T: (T,) cache slot of each token.
        spans: sequences in the order of their rows.
        ones: sequences with a single row that are not in `spans`.
    """

    cache: PagedCache
    positions: Tensor
    places_T: Tensor
    spans: tuple[Span, ...]
    ones: tuple[Ones, ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether keys and values are stored for later tokens."""
        return True

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
        rule = PLAIN if rule is None else rule
        k_all, v_all = self.cache.k[layer_index], self.cache.v[layer_index]
        k_all.index_copy_(0, self.places_T, k_Thd.to(k_all.dtype))
        if v_all.data_ptr() != k_all.data_ptr():
            v_all.index_copy_(0, self.places_T, v_Thd.to(v_all.dtype))
        # with one row, the query heads of a key head act as its queries
        q_T1hGd = q_THd.reshape(len(q_THd), 1, k_all.shape[1], -1, q_THd.shape[2]).unbind(0)
        is_plain = rule.is_plain and rule.window is None and rule.chunk is None
        parts = []
        for span in self.spans:
            if span.pieces_L is not None:
                k, v = (pieces[layer_index] for pieces in span.pieces_L)
            else:
                assert span.places_L is not None
                k, v = (
                    t.index_select(0, span.places_L).transpose(0, 1)[None] for t in (k_all, v_all)
                )
            is_one, seen, own = span.count == 1 and not arithmetic.batch_invariant, span.seen, rule
            if is_one and (first := rule.first_seen(span.num_keys - 1)):
                k, v = (t[:, :, first:] for t in (k, v))
                seen, own = (
                    visible(1, k.shape[2], device=k.device),
                    replace(rule, window=None, chunk=None),
                )
            if is_one and rule.is_plain:
                parts.append(F.scaled_dot_product_attention(q_T1hGd[span.first], k, v))
            else:
                q = q_THd.narrow(0, span.first, span.count).transpose(0, 1)[None]
                if is_plain and not arithmetic.batch_invariant and blockwise.serves(q, k):
                    y = blockwise.causal_attention(q, k, v)
                else:
                    y = arithmetic.attention(q, k, v, seen, own)
                parts.append(y[0].transpose(0, 1).view(span.count, *q_T1hGd[0].shape[1:]))
        if not self.ones:
            return torch.cat(parts).flatten(1)
        y_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        for span, part in zip(self.spans, parts, strict=True):
            y_THd.narrow(0, span.first, span.count).copy_(part.view(span.count, *q_THd.shape[1:]))
        for ones in self.ones:
            q_BHd, mask_BL = q_THd.index_select(0, ones.rows), ones.mask(rule)
            y_BHd = one_query_attention(q_BHd, k_all, v_all, ones.places_BL, mask_BL, rule)
            y_THd.index_copy_(0, ones.rows, y_BHd)
        return y_THd.flatten(1)


def ones_of(
    sequences: Iterable[tuple[int, Sequence[int], int]], *, cache: PagedCache
) -> tuple[Ones, ...]:
    """Groups of single-row sequences with similar numbers of keys.

    Args:
        sequences: (row, block table, number of keys) of each.
        cache: cache of their keys.
    """
    groups: list[list[tuple[int, Sequence[int], int]]] = []
    for one in sorted(sequences, key=lambda one: one[2]):
        # padding is at most as long as the keys
        if not groups or one[2] > 2 * max(groups[-1][0][2], BLOCK_KEYS):
            groups.append([])
        groups[-1].append(one)
    found = []
    for group in groups:
        length = -(-group[-1][2] // BLOCK_KEYS) * BLOCK_KEYS
        places = []
        for _, blocks, num_keys in group:
            own = cache.places(blocks, 0, num_keys)
            places.append(own + own[-1:] * (length - num_keys))
        rows, _, counts = zip(*group, strict=True)
        device = cache.k.device
        found.append(
            Ones(torch.tensor(rows, device=device), counts, torch.tensor(places, device=device))
        )
    return tuple(found)


def span_of(
    blocks: Sequence[int], *, first: int, start: int, count: int, cache: PagedCache
) -> Span:
    """Span of a sequence that computes tokens start ... start + count - 1."""
    num_keys = start + count
    seen = visible(count, num_keys, device=cache.k.device)
    used = blocks[: -(-num_keys // cache.block_size)]
    if all(b == a + 1 for a, b in zip(used, used[1:], strict=False)):
        begin = used[0] * cache.block_size
        pieces = tuple(
            memory.narrow(1, begin, num_keys).transpose(1, 2).unsqueeze(1).unbind(0)
            for memory in (cache.k, cache.v)
        )
        return Span(first, count, num_keys, None, pieces, seen)
    places = torch.tensor(cache.places(used, 0, num_keys), device=cache.k.device)
    return Span(first, count, num_keys, places, None, seen)
