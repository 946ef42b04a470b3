"""Qwen2-MoE: biases on queries, keys and values, a shared expert with a gate."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Values, anything, other_model
from expertmesh.models.gpt.config import ModelConfig


def _read(v: Values) -> dict[str, Any]:
    options = parts.qwen(v)
    options["moe"] |= {
        "shared_hidden_dim": v["shared_expert_intermediate_size"],
        "num_shared_experts": 1,
        "shared_gate": True,
    }
    return {"qkv_bias": v["qkv_bias"]} | _windows(v) | options


def _windows(v: Values) -> dict[str, Any]:
    """Windows without `layer_types`: transformers 5 gives them to the even layers among the first
    `max_window_layers`."""
    layers, first = v["num_hidden_layers"], v["max_window_layers"]
    kinds = v.get("layer_types") or []
    if not v.get("use_sliding_window"):
        if any(kind != "full_attention" for kind in kinds):
            wanted = "full_attention in every layer, or use_sliding_window"
            raise other_model(f"layer_types={kinds!r}", "qwen2_moe", wanted)
        return {}
    usual = parts.layer_types(layers, 2)[:first] + parts.layer_types(layers, 1)[first:]
    return parts.windows(v, kinds or usual, parts.window_in_force(v))


def _write(c: ModelConfig) -> dict[str, Any]:
    values = parts.write_qwen(c) | {"qkv_bias": c.qkv_bias}
    shared = c.moe.shared_hidden_dim or c.moe.num_shared_experts * c.moe.hidden_dim
    values["shared_expert_intermediate_size"] = shared
    if c.sliding_window is not None:
        values["layer_types"] = parts.layer_types(c.num_layers, c.full_attention_every)
    return values


QWEN2_MOE = HubFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    title="Qwen2-MoE",
    read=_read,
    write=_write,
    fits={
        **dict.fromkeys(("qkv_bias", "sliding_window", "full_attention_every"), anything),
        **dict.fromkeys(("first_dense_layers", "moe_every", "moe.shared_hidden_dim"), anything),
        "moe.num_shared_experts": lambda c: bool(c.moe.num_shared_experts or c.moe.shared_hidden_dim),
        "moe.shared_gate": (True,),
    },
    defaults=parts.QWEN
    | {
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
        "max_window_layers": 28,
    },
    nulls=("sliding_window",),
    renamed=((".shared_experts.", ".shared_expert."),),
)
