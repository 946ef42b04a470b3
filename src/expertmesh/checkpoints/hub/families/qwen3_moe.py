"""Qwen3-MoE: norms on queries and keys of each head, dense layers between those with experts."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.families.glm4_moe import AS_GLM, WHOLE_GLM
from expertmesh.checkpoints.hub.family import HubFamily, Values, anything
from expertmesh.errors import named
from expertmesh.models.gpt.config import ModelConfig

AS_QWEN = f"one with {named('model.qk_norm', True)} goes out as Qwen3-MoE, which has it; "


def _read(v: Values) -> dict[str, Any]:
    window = parts.window_in_force(v) if v.get("use_sliding_window") else None
    kinds = parts.layer_types(v["num_hidden_layers"], None)
    return {"qk_norm": True} | parts.windows(v, kinds, window) | parts.qwen(v)


def _write(c: ModelConfig) -> dict[str, Any]:
    return parts.write_qwen(c) | {"attention_bias": False}


QWEN3_MOE = HubFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen3-MoE",
    read=_read,
    write=_write,
    fits={
        "qk_norm": (True,),
        **dict.fromkeys(("sliding_window", "first_dense_layers", "moe_every"), anything),
    },
    ways={
        **dict.fromkeys(("moe.score_function", "moe.bias_update_rate"), WHOLE_GLM),
        **dict.fromkeys(("qkv_bias", "rope_fraction", "moe.weight_scale"), AS_GLM),
        **dict.fromkeys(("moe.num_expert_groups", "moe.num_shared_experts"), AS_GLM),
    },
    defaults=parts.QWEN | {"num_key_value_heads": 4, "num_experts_per_tok": 8},
    nulls=("sliding_window",),
    refused={"attention_bias": (False, None)},
)
