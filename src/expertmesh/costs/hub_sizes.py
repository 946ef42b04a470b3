"""Checks of the sizes in a config.json of the hub: whole numbers in a sensible range that fit one another."""

from collections.abc import Mapping
from typing import Any

from expertmesh.config.values import WHOLE, Number, shown
from expertmesh.errors import ConfigError

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Names of the number of routed experts."""
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""Names of the number of experts of a token."""
_OF_PART = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_POSITIVE = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "intermediate_size_mlp"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
)
_OR_NONE = (
    *(*EXPERTS, *TOP_K, "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "q_lora_rank"),
    *("decoder_sparse_step", "interleave_moe_layer_step", "sliding_window"),
    *("num_nextn_predict_layers", "num_mtp_layers"),
)
_SWITCHES = (
    *("tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "use_qk_norm"),
    *("attention_bias", "mlp_bias", "rope_interleave"),
)
_MOST, _MOST_LAYERS = 2**31 - 1, 100_000


def check_hub_sizes(values: Mapping[str, Any], *, is_part: bool = False) -> None:
    """Refuse a size that no model has, and a switch that is neither true nor false; missing ones and nulls pass.

    Args:
        is_part: whether the model is a part, which may lack vocabulary and attention.
    """
    least = dict.fromkeys(_OF_PART, 0 if is_part else 1)
    least |= dict.fromkeys(_POSITIVE, 1) | dict.fromkeys(_OR_NONE, 0)
    for name, smallest in least.items():
        value = values.get(name)
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
        size = Number(smallest, most, types=WHOLE, optional=True)
        if not size.holds(value):
            raise _wrong(name, value, size.rule)
    for name in _SWITCHES:
        if not isinstance(value := values.get(name), bool | None):
            raise _wrong(name, value, "must be true or false")


def check_together(values: Mapping[str, Any]) -> None:
    """Refuse sizes that `check_hub_sizes` lets pass and that do not fit one another."""
    heads = values["num_attention_heads"]
    if heads and "kv_lora_rank" not in values:
        keys = values.get("num_key_value_heads", heads)
        if heads % keys:
            raise _wrong("num_key_value_heads", keys, f"must divide the {heads} of num_attention_heads")
        if "head_dim" not in values and values["hidden_size"] % heads:
            rule = f"must divide the {values['hidden_size']} of hidden_size where no head_dim is"
            raise _wrong("num_attention_heads", heads, rule)
    experts = next((n for n in EXPERTS if n in values), None)
    if experts is None or not values[experts]:
        return
    top_k = next((n for n in TOP_K if n in values), TOP_K[0])
    if not 1 <= values[top_k] <= values[experts]:
        rule = f"must be from 1 to the {values[experts]} of {experts}"
        raise _wrong(top_k, values[top_k], rule)
    hidden = "moe_intermediate_size"
    if values.get(hidden, 1) < 1:
        raise _wrong(hidden, values[hidden], f"must be above 0 with the {values[experts]} experts")


def _wrong(name: str, value: object, rule: str) -> ConfigError:
    said = shown(repr(value))
    return ConfigError(f"config.json has {name}={said}: {rule}; correct it, or restore it from the hub")
