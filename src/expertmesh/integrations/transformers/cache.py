"""Keys and values in a cache of transformers, as our GPT asks for them."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from expertmesh.errors import ConfigError


class SequencesOf:
    """A `expertmesh.models.gpt.model.SequenceCache` whose memory is a cache of transformers that grows.

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

    def begin(
        self, ids_BS: Tensor, *, token_mask_BS: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Positions (S,) of the new tokens, in columns of the batch, and who may look where; None: causal serves.

        Args:
            ids_BS: (B, S) the new tokens.
            token_mask_BS: (B, S) bool, the last columns of the mask of all tokens; not read.

        Raises:
            ConfigError: the mask of all tokens does not cover those in the cache, or there are too many tokens.
        """
        past = self._cache.get_seq_length()
        S = ids_BS.shape[1]
        if past + S > self._max_seq_len:
            raise ConfigError(
                f"a sequence of {past + S} tokens, {past} of them in the cache: must be at most max_seq_len={self._max_seq_len}; "
                "shorten the prompt, or generate fewer (max_new_tokens)"
            )
        keys_K = torch.arange(past + S, device=ids_BS.device)
        positions_S = keys_K[past:]
        causal_SK = keys_K <= positions_S[:, None]
        mask_BK = self._token_mask_BK
        if mask_BK is None:
            return positions_S, None if S == 1 or past == 0 else causal_SK[None, None]
        if mask_BK.shape[1] != past + S:
            raise ConfigError(
                f"attention_mask: has {mask_BK.shape[1]} columns for {past} tokens in the cache and {S} new ones; give one for each"
            )
        # a padding token looks at itself, so that no row of the softmax is empty
        visible_BSK = mask_BK[:, None, :] | (keys_K == positions_S[:, None])
        return positions_S, (causal_SK & visible_BSK)[:, None]

    def update(self, layer_index: int, *, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer; returns those of all tokens so far."""
        k_BHKD, v_BHKD = self._cache.update(k_BHSD, v_BHSD, layer_index)
        return k_BHKD, v_BHKD
