"""Which keys the queries of one call may look at: the only place where an attention mask is made."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visible:
    """What the queries of B sequences, the last S of L tokens each, may look at; a pytree.

    Attributes:
        num_queries: S.
        is_causal: whether a query sees no later key. Without a mask it sees every key up to its own.
        mask: (B or 1, 1, S or 1, L) bool, True where a query may look; None: the causal order alone, or everything.
        first_B: (B,) int64 column of the first token of each sequence, behind its padding; None: column 0.
    """

    num_queries: int
    is_causal: bool = True
    mask: Tensor | None = None
    first_B: Tensor | None = None


torch.utils._pytree.register_dataclass(
    Visible, field_names=["num_queries", "is_causal", "mask", "first_B"], drop_field_names=[]
)


def visible(
    num_queries: int,
    num_keys: int,
    *,
    device: torch.device,
    is_token_BL: Tensor | None = None,
    document_BS: Tensor | None = None,
) -> Visible:
    """What causal queries may look at. Does not synchronise with the device.

    A padding token looks at itself, so that no row of the softmax is empty.

    Args:
        num_queries: S, the last tokens of the keys.
        num_keys: L >= S.
        device: of the mask.
        is_token_BL: (B, L) bool, False for padding, which no other token looks at; None: there is none.
        document_BS: (B, S) integers, of L = S tokens: tokens look at those with the same number only; None: at all.
    """
    if is_token_BL is None and document_BS is None and num_queries in (1, num_keys):
        return Visible(num_queries)
    keys_L = torch.arange(num_keys, device=device)
    queries_S = keys_L[num_keys - num_queries :]
    mask = (keys_L <= queries_S[:, None])[None]
    first_B = None
    if is_token_BL is not None:
        mask = mask & (is_token_BL.bool()[:, None, :] | (keys_L == queries_S[:, None]))
        first_B = is_token_BL.to(torch.int32).argmax(-1)
    if document_BS is not None:
        mask = mask & (document_BS[:, :, None] == document_BS[:, None, :])
    return Visible(num_queries, mask=mask[:, None], first_B=first_B)


def visible_source(is_token_BL: Tensor | None, *, num_queries: int) -> Visible:
    """Every key that is no padding, whatever its place: of an encoder, or of a decoder that looks at its source.

    Args:
        is_token_BL: (B, L) bool, False for padding; None: there is none.
        num_queries: S.
    """
    mask = None if is_token_BL is None else is_token_BL[:, None, None]
    return Visible(num_queries, is_causal=False, mask=mask)
