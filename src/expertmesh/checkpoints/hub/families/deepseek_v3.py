"""DeepSeek-V3, Kimi-K2 and Moonlight: latent attention, sigmoid scores with a balancing bias, groups by their two best
experts."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Values
from expertmesh.models.gpt.config import ModelConfig


def _read(v: Values) -> dict[str, Any]:
    return parts.latent(v) | parts.sigmoid_mixture(v)


def _write(c: ModelConfig) -> dict[str, Any]:
    values = parts.write_latent(c) | parts.write_shared_mixture(c)
    return values | {"scoring_func": "sigmoid", "num_nextn_predict_layers": 0}


DEEPSEEK_V3 = HubFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek-V3",
    aliases=("kimi_k2",),
    read=_read,
    write=_write,
    fits=parts.SIGMOID | {"latent.kv_lora_rank": lambda c: c.is_latent},
    defaults=parts.LATENT_DEFAULTS
    | {
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
    },
    nulls=("q_lora_rank", "norm_topk_prob", "rope_interleave"),
    refused=parts.LATENT_REFUSED | {"topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid", None)},
)
