"""Checks of the arguments of our model in transformers, each error on one line, before anything is computed or stored.

Values (ids, labels, mask entries) are checked on CPUs only: elsewhere the host would wait for the device.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from expertmesh.config.values import Number, check_choice, type_of, wrong_type
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.inputs import check_ids
from expertmesh.ops.check import (
    BOOL,
    FLOATS,
    INTEGERS,
    WHOLE,
    Arg,
    Dtypes,
    check_tensor,
    wrong_shape,
)
from expertmesh.ops.plain_call import can_look_at

IGNORED = -100
"""Label of positions that are not predicted."""
_LABELS = Arg(
    "BS",
    INTEGERS,
    "that of input_ids",
    below="V",
    but=IGNORED,
    fix="use input_ids, the model shifts them",
)
_MASK = Arg(
    "BL",
    Dtypes("bool or int64", (*BOOL.dtypes, *INTEGERS.dtypes, *FLOATS.dtypes)),
    "one entry per token, those in the cache included, 0 for padding: who looks at whom follows from it",
    reshape="cut it; for packed documents train with expertmesh, or give one document per row",
)
_ONE = Arg("*", Dtypes("a number", (*INTEGERS.dtypes, *FLOATS.dtypes)))
_KEPT = Number(0, fix="leave it out for all positions", types=WHOLE)
_ITEMS = Number(0, fix="give the predicted tokens of the whole batch", is_open=True)


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
    """Check the arguments of `ExpertMeshForCausalLM.forward`, whose docstring has their meanings."""
    if return_dict is False:
        raise ConfigError("return_dict=False: this model returns no tuples; leave it out")
    for name, value in unused.items():
        if value is not None and value is not False:
            raise ConfigError(f"{name}: is no argument of a GPT of expertmesh; leave it out")
    if input_ids is None:
        raise ConfigError("input_ids=None: this model reads token ids; give them")
    check_ids(input_ids, vocab_size=config.vocab_size, max_len=None, name="input_ids")
    _KEPT.check("logits_to_keep", logits_to_keep)
    check_choice("use_cache", use_cache, (True, False, None))
    past = 0 if past_key_values is None else _past(past_key_values, input_ids, config)
    if attention_mask is not None:
        _check_mask(attention_mask, input_ids, past)
    if labels is None:
        return
    if logits_to_keep:
        raise ConfigError(
            f"logits_to_keep={logits_to_keep}: labels need the logits of all positions; leave one of the two out"
        )
    B, S = input_ids.shape
    sizes = {"B": B, "S": S, "V": config.vocab_size}
    check_tensor("labels", labels, _LABELS, sizes, device=input_ids.device)
    if num_items_in_batch is not None:
        _check_items(num_items_in_batch)


def _past(cache: Any, input_ids: Tensor, config: ModelConfig) -> int:
    """Number of tokens in a cache, after checks that it grows and belongs to this model and these sequences."""
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        fix = "take it from an output of this model"
        raise wrong_type("past_key_values", cache, "a DynamicCache of transformers", fix)
    if cache.is_compileable:
        raise ConfigError(
            f"past_key_values: {type_of(cache)} has a fixed size; use a DynamicCache, or leave cache_implementation out"
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
            f"past_key_values has {len(cache.layers)} layers of {heads} heads of {size}; the model has "
            f"{config.num_layers} of {config.cache_heads} of {config.cache_size}; take it from an output of this model"
        )
    if rows != len(input_ids):
        raise ConfigError(
            f"past_key_values holds {rows} sequences and input_ids has {len(input_ids)}; they must be as many; use "
            "the cache of these"
        )
    return past


def _check_mask(mask: Any, input_ids: Tensor, past: int) -> None:
    B, S = input_ids.shape
    sizes = {"B": B, "L": past + S}
    declared = _MASK._replace(of=f"{_MASK.of} ({past} tokens in the cache)") if past else _MASK
    check_tensor("attention_mask", mask, declared, sizes, device=input_ids.device)
    if mask.dtype not in BOOL.dtypes and can_look_at(mask):
        wrong = (mask != 0) & (mask != 1)
        if bool(wrong.any()):
            raise ConfigError(
                f"attention_mask holds {mask[wrong][0].item():g}; it must hold 1, and 0 for padding; do not add it to "
                "anything"
            )


def _check_items(items: Any) -> None:
    if isinstance(items, Tensor):
        check_tensor("num_items_in_batch", items, _ONE, {})
        if items.numel() != 1:
            raise wrong_shape("num_items_in_batch", items, "one number", "sum it")
        items = items.item() if can_look_at(items) else 1
    _ITEMS.check("num_items_in_batch", items)
