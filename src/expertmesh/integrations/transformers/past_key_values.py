"""Keys and values in a cache of transformers, as our GPT asks for them."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from expertmesh.models.attention import DenseContext


class SequencesOf:
    """A `expertmesh.models.attention.LayerCache` whose memory is a cache of transformers that grows.

    Args:
        cache: holds what came before, and gets what comes.
        token_mask_BK: (B, keys) bool over the tokens before and the new ones, False for padding; None: there is none.
    """

    def __init__(self, cache: Cache, token_mask_BK: Tensor | None) -> None:
        self._cache, self._token_mask_BK = cache, token_mask_BK

    def begin(self, num_new: int, *, device: torch.device, counts_padding: bool) -> DenseContext:
        """What new tokens may look at.

        Args:
            num_new: columns of the new tokens.
            device: the device of the new tokens.
            counts_padding: see `DenseContext.of`.
        """
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
        """Store new keys and values of a layer; returns those of all tokens so far."""
        k_BHKD, v_BHKD = self._cache.update(k_BHSD, v_BHSD, layer_index)
        return k_BHKD, v_BHKD
