"""Score rules of attention beside the softmax: sliding window, chunks, soft cap, sinks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertmesh.ops.attention.visible import Visible


@dataclass(frozen=True)
class ScoreRule:
    """Modifications of the scores q k^T / sqrt(d) in one layer.

    Attributes:
        sinks_H: (H,) extra score per query head that enters the softmax without a value (gpt-oss; Xiao et al., arXiv
            2309.17453); None: no sinks.
        chunk: positions per chunk; a query attends to keys of its own chunk only (Llama 4); None: no chunks. Keys begin
            at position 0.

    Example:
        >>> rule = ScoreRule(window=128, sinks_H=torch.zeros(8))
    """

    # number of keys that a query attends to: its own and the window - 1 before it; None: all before it
    window: int | None = None
    softcap: float | None = None  # c; scores become c tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2); None: no cap
    sinks_H: Tensor | None = None
    chunk: int | None = None

    def first_seen(self, position: int) -> int:
        """First key that a query at a position attends to."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    @property
    def is_plain(self) -> bool:
        """Whether scores are unmodified except for a window or chunks."""
        return self.softcap is None and self.sinks_H is None


PLAIN = ScoreRule()
"""Rule without window, cap, sinks and chunks."""


def in_window(visible: Visible, rule: ScoreRule, *, num_keys: int, device: torch.device) -> Visible:
    """Restrict visible keys to the rule's window and chunks; a mask is made if there is none.

    Args:
        visible: visible keys before the restriction.
    """
    S = visible.num_queries
    sizes = [size for size in (rule.window, rule.chunk) if size is not None]
    if not sizes or (min(sizes) >= num_keys and visible.is_causal):
        return visible
    keys_L = torch.arange(num_keys, device=device)
    queries_S1 = keys_L[num_keys - S :, None]
    first_S1 = torch.zeros_like(queries_S1) if rule.window is None else queries_S1 - rule.window + 1
    if rule.chunk is not None:
        first_S1 = torch.maximum(first_S1, queries_S1 // rule.chunk * rule.chunk)
    mask = keys_L >= first_S1
    if visible.mask is not None:
        mask = mask & visible.mask
    elif visible.is_causal:
        mask = mask & (keys_L <= queries_S1)
    return replace(visible, mask=mask.expand(1, 1, S, num_keys) if mask.ndim == 2 else mask)


def as_mask(visible: Visible, *, num_keys: int, device: torch.device) -> Tensor:
    """(B or 1, 1, S or 1, L) bool mask of visible keys; made if there is none."""
    if visible.mask is not None:
        return visible.mask
    if not visible.is_causal:
        return torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=device)
    keys_L = torch.arange(num_keys, device=device)
    return (keys_L <= keys_L[num_keys - visible.num_queries :, None])[None, None]
