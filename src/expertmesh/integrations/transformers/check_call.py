"""Checks of the arguments of our model in transformers, each error on one line, before anything is computed or stored.

Values (ids, labels, mask entries) are checked on CPUs only: elsewhere the host would wait for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.inputs import (
    check_count,
    check_ids,
    check_range,
    check_shape,
    check_whole,
)
from expertmesh.ops.plain_call import can_look_at

IGNORED = -100
"""Label of positions that are not predicted."""


def check_call(
    config: ModelConfig,
    input_ids: Any,
    *,
    attention_mask: Any,
    past_key_values: Any,
    labels: Any,
    use_cache: Any,
    logits_to_keep: Any,
    num_items_in_batch: Any,
    return_dict: Any,
    unused: Mapping[str, Any],
) -> None:
    """Check the arguments of `ExpertMeshForCausalLM.forward`, whose docstring has their meanings.

    Raises:
        ConfigError: an argument has a wrong shape, dtype, device or range, or conflicts with another.
    """
    if return_dict is False:
        raise ConfigError("return_dict=False: this model returns no tuples; leave it out")
    for name, value in unused.items():
        if value is not None and value is not False:
            raise ConfigError(f"{name}: is no argument of a GPT of expertmesh; leave it out")
    if input_ids is None:
        raise ConfigError("input_ids=None: this model reads token ids; give them")
    check_ids(input_ids, vocab_size=config.vocab_size, max_len=None, name="input_ids")
    check_count("logits_to_keep", logits_to_keep, least=0, fix="leave it out for all positions")
    if use_cache not in (None, True, False):
        raise ConfigError(f"use_cache={use_cache!r}: must be True, False or None; leave it out")
    past = 0 if past_key_values is None else _past(past_key_values, input_ids, config)
    if attention_mask is not None:
        _check_mask(attention_mask, input_ids, past)
    if labels is None:
        return
    if logits_to_keep:
        raise ConfigError(
            f"logits_to_keep={logits_to_keep}: labels need the logits of all positions; leave one of the two out"
        )
    check_whole("labels", labels, input_ids, (tuple(input_ids.shape),), of="that of input_ids")
    fix = "use input_ids, the model shifts them"
    check_range("labels", labels, below=config.vocab_size, but=IGNORED, fix=fix)
    if num_items_in_batch is not None:
        _check_items(num_items_in_batch)


def _past(cache: Any, input_ids: Tensor, config: ModelConfig) -> int:
    """Number of tokens in a cache, after checks that it grows and belongs to this model and these sequences."""
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ConfigError(
            f"past_key_values is a {type(cache).__name__}; it must be a DynamicCache of transformers; take it from an output of this model"
        )
    if cache.is_compileable:
        raise ConfigError(
            f"past_key_values: a {type(cache).__name__} has a fixed size; use a DynamicCache, or leave "
            "cache_implementation out"
        )
    past, new = int(cache.get_seq_length()), input_ids.shape[1]
    most = config.max_seq_len
    if past + new > most:
        raise ConfigError(
            f"a sequence of {past + new} tokens, {past} of them in the cache: must be at most max_seq_len={most}; "
            "shorten the prompt, or generate fewer (max_new_tokens)"
        )
    # quantized layers have no such keys, and offloaded layers have them elsewhere
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    held = [k.shape for k in keys if isinstance(k, Tensor) and k.ndim == 4 and past]
    if not held:
        return past
    rows, heads, _, size = held[0]
    if len(cache.layers) != config.num_layers or (heads, size) != (
        config.cache_heads,
        config.cache_size,
    ):
        raise ConfigError(
            f"past_key_values has {len(cache.layers)} layers of {heads} heads of {size}; the model has {config.num_layers} of "
            f"{config.cache_heads} of {config.cache_size}; take it from an output of this model"
        )
    if rows != len(input_ids):
        raise ConfigError(
            f"past_key_values holds {rows} sequences and input_ids has {len(input_ids)}; they must be as many; use the cache of these"
        )
    return past


def _check_mask(mask: Any, input_ids: Tensor, past: int) -> None:
    if isinstance(mask, Tensor) and mask.ndim > 2:
        raise ConfigError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be (sequences, tokens), 0 for padding: who looks at whom follows from "
            "it; for packed documents train with expertmesh, or give one document per row"
        )
    B, S = input_ids.shape
    if past and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] != past + S:
        raise ConfigError(
            f"attention_mask: has {mask.shape[1]} columns for {past} tokens in the cache and {S} new ones; give one for each"
        )
    check_shape("attention_mask", mask, input_ids, (B, past + S), of="one entry per token")
    if mask.is_complex():
        raise ConfigError(f"attention_mask has dtype {mask.dtype}; it must be bool or int64")
    if mask.dtype != torch.bool and can_look_at(mask):
        wrong = (mask != 0) & (mask != 1)
        if bool(wrong.any()):
            raise ConfigError(
                f"attention_mask holds {mask[wrong][0].item():g}; it must hold 1, and 0 for padding; do not add it to anything"
            )


def _check_items(items: Any) -> None:
    if isinstance(items, Tensor):
        if items.numel() != 1 or items.is_complex() or items.dtype == torch.bool:
            raise ConfigError(
                f"num_items_in_batch has shape {tuple(items.shape)} and dtype {items.dtype}; it must be one number; sum it"
            )
        value = items.item() if can_look_at(items) else 1
    else:
        value = items
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(
            f"num_items_in_batch={value!r}: must be a number above 0; give the predicted tokens of the whole batch"
        )
