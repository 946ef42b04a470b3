"""Attention of a step's tokens over keys and values in pages: one operator, computed by the first of `IMPLEMENTATIONS`
that serves."""

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


def paged_attention(
    q_THd: Tensor,  # (T, H, d) queries
    k_NShd: Tensor,  # (pages, page size, heads, d) keys; heads divides H
    v_NShd: Tensor,  # (pages, page size, heads, n) values
    keys: PagedKeys,  # rows and pages of the sequences
    rule: ScoreRule = PLAIN,  # window, chunk, soft cap and sinks
    *,
    attention: Attention,  # attention of a padded batch, where there is no kernel; see `OpSet.attention`
    is_invariant: bool = False,  # whether `attention` is batch-invariant
) -> Tensor:
    """Compute softmax(rule(q k^T / sqrt(d))) v of every row over the keys up to its own; not seen by autograd.

    Returns:
        (T, H, n) in the type of q; 0 for padding rows.

    Example:
        >>> from expertmesh.ops.attention.dense import attention
        >>> pages = torch.randn(4, 16, 2, 64)
        >>> where = PagedKeys(torch.tensor([0, 1]), torch.tensor([20]), torch.tensor([[3, 0]]))
        >>> paged_attention(torch.randn(1, 8, 64), pages, pages, where, attention=attention).shape
        torch.Size([1, 8, 64])
    """
    one = next(one for one in IMPLEMENTATIONS.values() if one.serves(q_THd, k_NShd, v_NShd))
    y_THd: Tensor = one.attend(q_THd, k_NShd, v_NShd, keys, rule, attention=attention, is_invariant=is_invariant)
    return y_THd
