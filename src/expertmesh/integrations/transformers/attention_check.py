"""Opening check of a transformers model: how its layers attend, and whether steps of our engine give its own logits.

Three short sequences, at the first, middle and last positions of the model, are run as the engine runs them: packed, in
two steps, the later tokens in another order. Each must get the logits of the model's own pass of it alone. What depends
on a place in the step, on the length of a cache, on neighbours, or on state beside keys and values shows there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from expertmesh.errors import ConfigError
from expertmesh.ops.attention import query_blocks
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.attention.visible import Visible

_TOKENS, _SPLIT = 12, 7
"""Number of tokens of a sequence of the check, and how many of them are in its first step."""
_FAR = 1 << 20
"""Position at which mask functions are evaluated."""
_DRAWS = 3
"""Number of sequences at the same positions where products round to few bits."""
_EXACT, _NARROW = 1e-3, 0.05
"""Largest error of the logits by rounding, relative to the largest one: in FP32 and FP64, and in narrower types."""

Step = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Step of the engine: (T,) ids, (T,) positions, (R,) rows and pages -> (R, V) logits."""


def cache_argument(model: nn.Module) -> str:
    """Name of a model's argument for its cache, which transformers 5.24 renamed."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


class SeenTokens(Cache):
    """Cache that holds no keys, and knows how many tokens precede each token's place; keys pass through.

    A model that counts positions from the length of its cache computes `arange(T) + length`, which is then each token's
    own position, also where a step has several sequences.

    Args:
        seen: position of each token less its place in the step: one number, or (T,) int64.
    """

    def __init__(self, seen: int | Tensor) -> None:
        super().__init__(layers=[])
        self._seen = seen

    @classmethod
    def of(cls, positions_T: Tensor) -> "SeenTokens":
        """The cache of a step with tokens at these positions, (T,) int64."""
        return cls(positions_T - torch.arange(len(positions_T), device=positions_T.device))

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Position of each token less its place."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        """Number of keys, and the position of the first."""
        return query_length, self._seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values as they are."""
        return key_states, value_states


@dataclass
class AttentionProbe:
    """Argument passed instead of the engine's pages in the check: attends densely, and records how each layer
    attends."""

    sequence_T: Tensor  # (T,) sequence of each token of the step
    positions_T: Tensor  # (T,) position of each token
    masks: dict[int, Callable[..., Tensor] | None] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    kept: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    steps: int = 0  # number of steps so far

    def attend(
        self,
        layer: int,  # index of the layer
        query: Tensor,  # (1, H, T, d) queries, to be divided by sqrt(d)
        key: Tensor,  # (1, h, T, d) keys
        value: Tensor,  # (1, h, T, n) values
        *,
        mask: Callable[..., Tensor] | None,  # transformers' mask function of the layer; None: causal
        window: int | None,  # window of the layer; read where there is no mask function
        rule: ScoreRule,  # soft cap and sinks
    ) -> Tensor:
        """(1, H, T, size of a value) attention of a step's tokens within their sequences, earlier steps included."""
        self.calls.append(layer)
        self.masks[layer], self.windows[layer] = mask, window
        self.shapes[layer] = (key.shape[1], key.shape[-1], value.shape[-1])
        new = (
            key,
            value,
            self.sequence_T[None, None, :, None],
            self.positions_T[None, None, :, None],
        )
        old = self.kept.get(layer, tuple(t[:, :, :0] for t in new))
        kept = tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        self.kept[layer] = kept
        key, value, sequence, position = kept
        at, keys_at = self.positions_T[:, None], position.flatten()
        seen = (keys_at <= at) & (sequence.flatten() == self.sequence_T[:, None])
        if mask is not None:
            zero = torch.zeros((), dtype=torch.int64, device=at.device)
            seen = seen & mask(zero, zero, at, keys_at)
        elif window is not None:
            seen = seen & (keys_at > at - window)
        visible = Visible(len(at), is_causal=False, mask=seen.expand(1, 1, *seen.shape))
        return query_blocks.attention(query, key, value, visible, rule)

    def rules(self, name: str) -> tuple[ScoreRule, ...]:
        """Window or chunk of each layer."""
        places = sorted(self.masks)
        if not places or places != list(range(len(places))) or self.calls != places * self.steps:
            calls = len(self.calls) // self.steps
            raise ConfigError(
                f"{name}: {calls} calls of attention by layers {places}; each layer must attend once; use a model "
                "that does"
            )
        return tuple(_rule_of(name, i, self.masks[i], self.windows[i]) for i in places)

    def shape(self, name: str) -> tuple[int, int]:
        """Number of key heads, and the largest size of a key or value head."""
        shapes = set(self.shapes.values())
        if len(shapes) != 1:
            raise ConfigError(
                f"{name}: its layers have keys of different shapes {sorted(shapes)}; the engine has one cache for "
                "all; use another model"
            )
        heads, size, values = next(iter(shapes))
        return heads, max(size, values)


def _rule_of(name: str, layer: int, mask: Callable[..., Tensor] | None, window: int | None) -> ScoreRule:
    """Score rule (full, window, or chunks) of a mask function, from its values at a few far positions."""
    if mask is None:
        return ScoreRule(window=window)
    zero = torch.tensor(0)

    def first_seen(position: int) -> int:
        keys = torch.arange(position + 2)
        seen = mask(zero, zero, torch.tensor(position), keys).expand(position + 2)
        places = seen.nonzero()[:, 0]
        first = int(places[0])
        if len(places) != position + 1 - first:
            raise ConfigError(
                f"{name}: layer {layer} sees other keys than the last ones before a token; use a model with windows "
                "or chunks"
            )
        return first

    queries = [_FAR, _FAR - 7, _FAR - 12345, _FAR // 3]
    firsts = [first_seen(query) for query in queries]
    if not any(firsts):
        return ScoreRule(window=window)
    sizes = {query - first + 1 for query, first in zip(queries, firsts, strict=True)}
    if len(sizes) == 1:
        return ScoreRule(window=sizes.pop())
    chunk = math.gcd(*firsts)
    if all(query // chunk * chunk == first for query, first in zip(queries, firsts, strict=True)):
        return ScoreRule(chunk=chunk)
    raise ConfigError(f"{name}: layer {layer} has a mask that is neither a window nor a chunk; use another model")


@dataclass(frozen=True)
class CheckedSequences:
    """Sequences of the check, by start and draw, with the logits of the model's own pass of each alone."""

    ids_NS: Tensor  # (N, S) tokens
    positions_NS: Tensor  # (N, S) positions
    logits_NSV: Tensor  # (N, S, V) logits
    draws: int  # number of sequences with the same positions, neighbours among the N


def own_logits(model: Any, max_len: int) -> CheckedSequences:
    """Sequences at the first, middle and last positions, with the logits of the model's own passes."""
    device, size = model.device, min(_TOKENS, max_len)
    vocab_size = model.get_input_embeddings().num_embeddings
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    is_exact = is_wide and torch.get_float32_matmul_precision() == "highest"
    draws = 1 if is_exact else _DRAWS
    # others leave out the mask where all keys are fewer than a chunk, also across the border of two
    model.set_attn_implementation("eager")
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    logits: list[Tensor] = []
    for start in (0, max_len // 3, max_len - size):
        for _ in range(draws):
            ids.append((7 * torch.arange(size, device=device) + 5 + 3 * len(ids)) % vocab_size)
            positions.append(torch.arange(start, start + size, device=device))
            # a model that counts positions itself knows what precedes them by a cache alone
            seen = {"position_ids": positions[-1][None], cache_argument(model): SeenTokens(start)}
            output = model(input_ids=ids[-1][None], use_cache=False, **(seen if start else {}))
            logits.append(output.logits[0])
    return CheckedSequences(torch.stack(ids), torch.stack(positions), torch.stack(logits), draws)


def compare_steps(name: str, own: CheckedSequences, step: Step) -> AttentionProbe:
    """Run the sequences as the engine does, and compare their logits with the model's own.

    Returns:
        The probe, which knows how each layer attends.
    """
    N, S = own.ids_NS.shape
    sequence_NS = torch.arange(N, device=own.ids_NS.device)[:, None].expand(N, S)
    found = torch.empty_like(own.logits_NSV)
    probe = AttentionProbe(sequence_NS, own.positions_NS)
    for part, order in ((slice(_SPLIT), slice(None)), (slice(_SPLIT, S), range(N - 1, -1, -1))):
        ids, positions, sequence = (t[order, part].flatten() for t in (own.ids_NS, own.positions_NS, sequence_NS))
        if not len(ids):
            continue
        probe.sequence_T, probe.positions_T = sequence, positions
        probe.steps += 1
        rows = torch.arange(len(ids), device=ids.device).flip(0)
        logits = step(ids, positions, rows, probe).flip(0)
        found[order, part] = logits.unflatten(0, (N, -1))
    probe.rules(name)
    error_NS = (found - own.logits_NSV).abs().amax(-1) / own.logits_NSV.abs().max().clamp_min(1e-6)
    is_exact = own.draws == 1
    if not is_exact:
        # rounding may change a token's experts: a fault is in most tokens of a step, and in every draw
        error_NS = torch.stack([p.median(1).values for p in error_NS.float().split(_SPLIT, 1)], 1)
        error_NS = error_NS.unflatten(0, (-1, own.draws)).amin(1)
    worst = float(error_NS.max())
    if not worst <= (_EXACT if is_exact else _NARROW):
        start = int(own.positions_NS[int(error_NS.amax(1).argmax()) * own.draws, 0])
        raise ConfigError(
            f"{name}: its logits from position {start} on, over our attention and beside other sequences, are off by "
            f"{worst:.1e} of the largest; it does not keep to transformers' attention interface, or depends on more "
            "than the tokens of a sequence and their positions; use a model that does"
        )
    return probe
