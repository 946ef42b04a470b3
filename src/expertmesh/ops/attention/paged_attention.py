"""Attention of a step's tokens over keys and values in pages: one operator, computed by the first of `IMPLEMENTATIONS` that serves."""

from typing import Any

from torch import Tensor

from expertmesh.ops.attention import paged_gathered, paged_native, paged_triton, paged_varlen
from expertmesh.ops.attention.pages import Attention, PagedKeys
from expertmesh.ops.attention.scores import PLAIN, ScoreRule

IMPLEMENTATIONS = {
    "native": paged_native,
    "varlen": paged_varlen,
    "triton": paged_triton,
    "gathered": paged_gathered,
}
"""Modules with `serves` and `attend`, the best first."""
FEWEST_QUERIES, FEWEST_KEYS = 128, 320
"""Queries and keys of a prompt from which PyTorch's attention may be faster than the kernels (docs/log.md)."""


def paged_attention(
    q_THd: Tensor,
    k_NShd: Tensor,
    v_NShd: Tensor,
    keys: PagedKeys,
    rule: ScoreRule = PLAIN,
    *,
    attention: Attention,
    is_invariant: bool = False,
) -> Tensor:
    """Compute softmax(rule(q k^T / sqrt(d))) v of every row over the keys up to its own; not seen by autograd.

    Args:
        q_THd: (T, H, d) queries.
        k_NShd: (pages, page size, heads, d) keys; heads divides H.
        v_NShd: (pages, page size, heads, n) values.
        keys: rows and pages of the sequences.
        rule: window, chunk, soft cap and sinks.
        attention: attention of a padded batch, where there is no kernel; see `OpSet.attention`.
        is_invariant: whether `attention` is batch-invariant.

    Returns:
        (T, H, n) in the type of q; 0 for padding rows.

    Example:
        >>> from expertmesh.ops.attention.dense import attention
        >>> pages = torch.randn(4, 16, 2, 64)
        >>> where = PagedKeys(torch.tensor([0, 1]), torch.tensor([20]), torch.tensor([[3, 0]]))
        >>> paged_attention(torch.randn(1, 8, 64), pages, pages, where, attention=attention).shape
        torch.Size([1, 8, 64])
    """
    name = next(name for name, one in IMPLEMENTATIONS.items() if one.serves(q_THd, k_NShd, v_NShd))
    how: dict[str, Any] = {"attention": attention, "is_invariant": is_invariant}
    few: PagedKeys | None = keys
    long: PagedKeys | None = None
    if name == "native" and not is_invariant and _is_faster_in_products(q_THd, rule):
        few, long = keys.parted(FEWEST_QUERIES, FEWEST_KEYS)
    y_THd = None
    if few is not None:
        y_THd = IMPLEMENTATIONS[name].attend(q_THd, k_NShd, v_NShd, few, rule, **how)
    if long is not None:
        y_THd = paged_gathered.attend(q_THd, k_NShd, v_NShd, long, rule, **how, y_THd=y_THd)
    assert y_THd is not None
    return y_THd


def _is_faster_in_products(q_THd: Tensor, rule: ScoreRule) -> bool:
    """Whether padded batches are faster for prompts that are long."""
    is_plain = rule.is_plain and rule.window is None and rule.chunk is None
    return is_plain and paged_native.products_are_faster(q_THd.dtype)
