"""Attention over pages by attention of padded batches: the keys of similar sequences are gathered and aligned to the
right.

The number of operators depends on the number of different lengths, by factors of two, not on the number of sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.ops.attention.pages import Attention, PagedKeys
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.attention.visible import Visible, visible

FEWEST_KEYS = 64
"""Keys up to which sequences of any lengths are in one batch; beyond, padding is at most as long as the keys."""


def serves(q_THd: Tensor, k_NShd: Tensor, v_NShd: Tensor) -> bool:
    """Whether `attend` takes these tensors: all."""
    return True


def attend(
    q_THd: Tensor,
    k_NShd: Tensor,
    v_NShd: Tensor,
    keys: PagedKeys,
    rule: ScoreRule,
    *,
    attention: Attention,
    is_invariant: bool,
) -> Tensor:
    """See `expertmesh.ops.attention.paged_attention.paged_attention`."""
    if "batches" not in keys.memo:
        keys.memo["batches"] = tuple(_batches(keys))
    batches: tuple[_Batch, ...] = keys.memo["batches"]
    y_THd = q_THd.new_zeros(*q_THd.shape[:2], v_NShd.shape[3])
    for batch in batches:
        found = batch.under(rule, k_NShd.shape[1], from_first=is_invariant)
        own = replace(rule, window=None, chunk=None) if found.has_rule else rule
        q_BHSd = q_THd[batch.rows].unflatten(0, (-1, batch.num_queries)).transpose(1, 2)
        k_BhLd, v_BhLd = (
            t.flatten(0, 1)[found.places].view(len(q_BHSd), -1, *t.shape[2:]).transpose(1, 2) for t in (k_NShd, v_NShd)
        )
        y_BHSd = attention(q_BHSd, k_BhLd, v_BhLd, found.visible, own)
        y_THd[batch.rows] = y_BHSd.transpose(1, 2).flatten(0, 1)
    return y_THd


class _Keys(NamedTuple):
    """Keys of a batch under one rule."""

    places: Tensor | slice  # (B, L) slots in the pages; a slice for one sequence whose slots are adjacent
    visible: Visible  # keys that each query sees
    has_rule: bool  # whether `visible` contains the rule's window and chunk


@dataclass(frozen=True)
class _Batch:
    """Sequences of a step with equally many queries."""

    rows: Tensor | slice  # (B * S,) rows of the queries; a slice if there is one sequence
    num_queries: int  # S
    lengths: tuple[int, ...]  # keys of each sequence
    table_BN: Tensor  # pages of each
    found: dict[tuple[int | None, int | None], _Keys] = field(default_factory=dict)  # keys by rule

    def under(self, rule: ScoreRule, page_size: int, *, from_first: bool) -> _Keys:
        """Keys under a rule; with `from_first`, those before a window stay, so that blocks of keys begin at the
        first."""
        name = rule.window, rule.chunk
        if name not in self.found:
            S = self.num_queries
            low = tuple(0 if from_first else rule.first_seen(n - S) for n in self.lengths)
            num = max(n - first for n, first in zip(self.lengths, low, strict=True))
            is_padded = any(n - first != num for n, first in zip(self.lengths, low, strict=True))
            self.found[name] = _Keys(self._places(page_size, num), *self._visible(rule, num, any(low), is_padded))
        return self.found[name]

    def _places(self, page_size: int, num: int) -> Tensor | slice:
        """Slots of the last `num` keys of each sequence; those before its first key are any."""
        device = self.table_BN.device
        if len(self.lengths) == 1:
            first = self.lengths[0] - num
            pages = self.table_BN[0, : -(-self.lengths[0] // page_size)].tolist()[first // page_size :]
            if pages == list(range(pages[0], pages[0] + len(pages))):
                start = pages[0] * page_size + first % page_size
                return slice(start, start + num)
        key_BL = self._last_keys(num, device).clamp_(min=0)
        return self.table_BN.gather(1, key_BL // page_size) * page_size + key_BL % page_size

    def _visible(self, rule: ScoreRule, num: int, is_cut: bool, is_padded: bool) -> tuple[Visible, bool]:
        S, device = self.num_queries, self.table_BN.device
        if not is_padded and not is_cut:
            return visible(S, num, device=device), False
        if not is_padded and S == 1:
            return Visible(1), True
        key_B1L = self._last_keys(num, device)[:, None]
        query_BS1 = key_B1L[:, 0, num - S :, None]
        mask = (key_B1L >= 0) & (key_B1L <= query_BS1)
        if rule.window is not None:
            mask &= key_B1L > query_BS1 - rule.window
        if rule.chunk is not None:
            mask &= key_B1L >= query_BS1 // rule.chunk * rule.chunk
        first_B = (-key_B1L[:, 0, 0]).clamp_(min=0)
        return Visible(S, mask=mask[:, None], first_B=first_B), True

    def _last_keys(self, num: int, device: torch.device) -> Tensor:
        """(B, num) numbers of the last keys; negative before the first."""
        first_B = torch.tensor(self.lengths, device=device) - num
        return first_B[:, None] + torch.arange(num, device=device)


def _batches(keys: PagedKeys) -> Iterator[_Batch]:
    """Batches of the sequences that have keys; synchronises with the device."""
    starts, lengths, device = keys.starts.tolist(), keys.num_keys_B.tolist(), keys.starts.device
    known = sorted(
        (starts[b + 1] - starts[b], length, b)
        for b, length in enumerate(lengths)
        if length and starts[b + 1] > starts[b]
    )
    found: list[list[tuple[int, int, int]]] = []
    for one in known:
        first = found[-1][0] if found else (0, 0, 0)
        if one[0] != first[0] or one[1] > 2 * max(first[1], FEWEST_KEYS):
            found.append([])
        found[-1].append(one)
    for group in found:
        S, sequences = group[0][0], [b for *_, b in group]
        rows: Tensor | slice = slice(starts[sequences[0]], starts[sequences[0]] + S)
        if len(group) > 1:
            first_B1 = torch.tensor([starts[b] for b in sequences], device=device)[:, None]
            rows = (first_B1 + torch.arange(S, device=device)).flatten()
        table_BN = keys.table_BN[torch.tensor(sequences, device=device)]
        yield _Batch(rows, S, tuple(length for _, length, _ in group), table_BN)
