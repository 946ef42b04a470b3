"""KV cache of transformers with the interface that our GPT uses."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from expertmesh.models.attention import DenseContext


class SequencesOf:
    """`expertmesh.models.attention.LayerCache` on a growing cache of transformers.

    Args:
        token_mask_BK: (B, keys) bool over preceding and new tokens, False for padding; None: no padding.
    """

    def __init__(self, cache: Cache, token_mask_BK: Tensor | None) -> None:
        self._cache, self._token_mask_BK = cache, token_mask_BK

    def begin(self, num_new: int, *, device: torch.device, counts_padding: bool) -> DenseContext:
        """Attention context of new tokens."""
        past = self._cache.get_seq_length()
        mask_BK = self._token_mask_BK
        return DenseContext.of(
            num_new,
            num_seen=past,
            device=device,
            is_token_BL=mask_BK,
            cache=self,
            counts_padding=counts_padding,
        )

    def update(self, layer_index: int, *, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values of a layer; returns the keys and values of all tokens so far."""
        k_BHKD, v_BHKD = self._cache.update(k_BHSD, v_BHSD, layer_index)
        return k_BHKD, v_BHKD
