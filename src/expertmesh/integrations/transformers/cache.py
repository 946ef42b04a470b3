"""Keys and values in a cache of transformers, as our GPT asks for them."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from expertmesh.errors import ConfigError
from expertmesh.models.attention import DenseContext


class SequencesOf:
    """A `expertmesh.models.attention.LayerCache` whose memory is a cache of transformers that grows.

    Args:
        cache: holds what came before, and gets what comes.
        token_mask_BK: (B, keys) bool over the tokens before and the new ones, False for padding; None: there is none.
        max_seq_len: most tokens of a sequence, those in the cache included.

    Raises:
        ConfigError: the cache has a fixed size.
    """

    def __init__(self, cache: Cache, token_mask_BK: Tensor | None, *, max_seq_len: int) -> None:
        if cache.is_compileable:
            raise ConfigError(
                f"past_key_values: a {type(cache).__name__} has a fixed size; use a DynamicCache, or leave "
                "cache_implementation out"
            )
        self._cache, self._token_mask_BK, self._max_seq_len = cache, token_mask_BK, max_seq_len

    def begin(self, num_new: int, *, device: torch.device, counts_padding: bool) -> DenseContext:
        """What new tokens may look at.

        Args:
            num_new: columns of the new tokens.
            device: the device of the new tokens.
            counts_padding: see `DenseContext.of`.

        Raises:
            ConfigError: the mask of all tokens does not cover those in the cache, or there are too many tokens.
        """
        past = self._cache.get_seq_length()
        end = past + num_new
        if end > self._max_seq_len:
            raise ConfigError(
                f"a sequence of {end} tokens, {past} of them in the cache: must be at most max_seq_len={self._max_seq_len}; "
                "shorten the prompt, or generate fewer (max_new_tokens)"
            )
        mask_BK = self._token_mask_BK
        if mask_BK is not None and mask_BK.shape[1] != end:
            raise ConfigError(
                f"attention_mask: has {mask_BK.shape[1]} columns for {past} tokens in the cache and {num_new} new ones; give one for each"
            )
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
