"""GLM-4-MoE: the mixture of DeepSeek-V3, ordinary attention with partial rotary positions."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Values, anything
from expertmesh.errors import named
from expertmesh.models.gpt.config import ModelConfig

_GLM = (
    f"{named('model.moe.score_function', 'sigmoid')}, and {named('model.moe.bias_update_rate')} and "
    f"{named('model.moe.num_shared_experts')} above 0"
)
AS_GLM = f"one with {_GLM} goes out as GLM-4-MoE, which has it; "
WHOLE_GLM = f"GLM-4-MoE has together {_GLM}; "


def _read(v: Values) -> dict[str, Any]:
    return {
        "qk_norm": v["use_qk_norm"],
        "qkv_bias": v["attention_bias"],
        "rope_fraction": parts.rope(v).get("partial_rotary_factor", v["partial_rotary_factor"]),
        **parts.sigmoid_mixture(v),
    }


def _write(c: ModelConfig) -> dict[str, Any]:
    return parts.write_shared_mixture(c) | {
        "num_nextn_predict_layers": 0,
        "attention_bias": c.qkv_bias,
        "use_qk_norm": c.qk_norm,
        "partial_rotary_factor": c.rope_fraction,
    }


GLM4_MOE = HubFamily(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    title="GLM-4-MoE",
    read=_read,
    write=_write,
    fits=parts.SIGMOID | dict.fromkeys(("qk_norm", "qkv_bias", "rope_fraction"), anything),
    ways={"moe.num_shared_experts": WHOLE_GLM},
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
    },
)
