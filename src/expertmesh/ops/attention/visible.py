"""Visible keys of each query: the only place where an attention mask is made."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visible:
    """Visible keys of the queries of B sequences, the last S of L tokens each; a pytree."""

    num_queries: int  # S
    # whether queries attend to no later key. Without a mask, a causal query attends to every key up to its own.
    is_causal: bool = True
    # (B or 1, 1, S or 1, L) bool, True for visible keys; None: all keys, or all up to the query's own if causal
    mask: Tensor | None = None
    # (B,) int64 column of each sequence's first token, after its left padding; None: column 0
    first_B: Tensor | None = None


torch.utils._pytree.register_dataclass(
    Visible, field_names=["num_queries", "is_causal", "mask", "first_B"], drop_field_names=[]
)


def visible(
    num_queries: int,  # S, the last tokens of the keys
    num_keys: int,  # L >= S
    *,
    device: torch.device,  # the device of the mask
    is_token_BL: Tensor | None = None,
    document_BS: Tensor | None = None,
) -> Visible:
    """Make the visible keys of causal queries. Does not synchronise with the device.

    A padding token attends to itself, so that no row of the softmax is empty.

    Args:
        is_token_BL: (B, L) bool, False for padding, to which no other token attends; None: no padding.
        document_BS: (B, S) integer document of each token, L = S; tokens attend within their document only; None: one
            document.
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
    """Make the visible keys of an encoder or of cross-attention: every key that is not padding.

    Args:
        is_token_BL: (B, L) bool, False for padding; None: no padding.
    """
    mask = None if is_token_BL is None else is_token_BL[:, None, None]
    return Visible(num_queries, is_causal=False, mask=mask)
