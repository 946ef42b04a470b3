"""What attention makes of its scores beside the softmax: a window, a soft cap, sinks; and attention by products, which does all of it."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast


@dataclass(frozen=True)
class ScoreRule:
    """How the scores of a layer differ from q k^T / sqrt(d).

    Attributes:
        window: a query sees its own key and the window - 1 before it; None: all before it.
        softcap: c; scores become c tanh(s / c) (Gemma 2, arXiv 2408.00118, section 2); None: they stay.
        sinks_H: (H,) one more score per query head, which takes its share of the softmax and has no value (gpt-oss; Xiao et al.,
            arXiv 2309.17453); None: there are none.
        chunk: a query sees the keys of its own chunk of so many positions only (Llama 4); None: there are none. Keys begin at position 0.

    Example:
        >>> rule = ScoreRule(window=128, sinks_H=torch.zeros(8))
    """

    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    chunk: int | None = None

    def first_seen(self, position: int) -> int:
        """The first key that a query at a position sees."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    @property
    def is_plain(self) -> bool:
        """Whether scores are as they are, but for a window or chunks."""
        return self.softcap is None and self.sinks_H is None


PLAIN = ScoreRule()
"""Nothing but q k^T / sqrt(d)."""


def in_window(visible: Visible, rule: ScoreRule, *, num_keys: int, device: torch.device) -> Visible:
    """What causal queries see through a window or in their chunk; the mask is made where there is none.

    Args:
        visible: without it.
        rule: has the window or the chunk.
        num_keys: L.
        device: of the mask.
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
    """(B or 1, 1, S or 1, L) bool: what is visible, as a mask in any case."""
    if visible.mask is not None:
        return visible.mask
    if not visible.is_causal:
        return torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=device)
    keys_L = torch.arange(num_keys, device=device)
    return (keys_L <= keys_L[num_keys - visible.num_queries :, None])[None, None]


def attention_by_products(
    q_BHSd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor, mask: Tensor, rule: ScoreRule
) -> Tensor:
    """softmax(rule(q k^T / sqrt(d)), where the mask is True) v, all in FP32 (FP64 for FP64); differentiable.

    Args:
        q_BHSd: (B, H, S, d) queries.
        k_BhLd: (B, h, L, d) keys; h divides H.
        v_BhLd: (B, h, L, d) values.
        mask: bool, broadcastable to (B, 1, S, L), True where a query may look; its window is in it.
        rule: see there.

    Returns:
        (B, H, S, d) in the type of q; queries that see nothing get 0.
    """
    (_, H, S, d), heads = q_BHSd.shape, k_BhLd.shape[1]
    dtype = accumulate_dtype(q_BHSd.dtype)
    with without_autocast(q_BHSd.device):
        q_BhRd = q_BHSd.to(dtype).unflatten(1, (heads, -1)).flatten(2, 3)
        s_BHSL = (q_BhRd @ k_BhLd.to(dtype).mT).unflatten(2, (-1, S)).flatten(1, 2) * d**-0.5
        if rule.softcap is not None:
            s_BHSL = rule.softcap * torch.tanh(s_BHSL / rule.softcap)
        s_BHSL = s_BHSL.masked_fill(~mask, -math.inf)
        largest = s_BHSL.detach().amax(-1, keepdim=True)
        sinks = None if rule.sinks_H is None else rule.sinks_H.to(dtype).view(H, 1, 1)
        if sinks is not None:
            largest = torch.maximum(largest, sinks.detach())
        largest = largest.masked_fill(largest == -math.inf, 0.0)
        p_BHSL = (s_BHSL - largest).exp()
        total = p_BHSL.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + (sinks - largest).exp()
        weights = p_BHSL / total.clamp_min(torch.finfo(dtype).tiny)
        y_BhRd = weights.unflatten(1, (heads, -1)).flatten(2, 3) @ v_BhLd.to(dtype)
        return y_BhRd.unflatten(2, (-1, S)).flatten(1, 2).to(q_BHSd.dtype)
