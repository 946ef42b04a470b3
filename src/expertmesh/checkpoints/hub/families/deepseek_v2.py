"""DeepSeek-V2: latent attention, softmax scores, groups by their best expert."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Values, anything
from expertmesh.models.gpt.config import ModelConfig


def _read(v: Values) -> dict[str, Any]:
    moe = parts.mixture(v, "n_routed_experts", "moe_intermediate_size", normalizes=False)
    moe["weight_scale"] = v["routed_scaling_factor"]
    moe["num_shared_experts"] = v["n_shared_experts"] or 0
    if v["topk_method"] == "group_limited_greedy" and (v.get("n_group") or 1) > 1:
        moe["num_expert_groups"], moe["num_limited_groups"] = v["n_group"], v["topk_group"]
        moe["group_score"] = "max"
    return parts.latent(v) | {"first_dense_layers": v["first_k_dense_replace"], "moe": moe}


def _write(c: ModelConfig) -> dict[str, Any]:
    grouped = c.moe.num_expert_groups > 1
    return {
        **parts.write_latent(c),
        **parts.write_shared_mixture(c),
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


DEEPSEEK_V2 = HubFamily(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    title="DeepSeek-V2",
    read=_read,
    write=_write,
    fits={
        "latent.kv_lora_rank": lambda c: c.is_latent,
        "latent.interleaved": (True,),
        "first_dense_layers": anything,
        "moe.score_function": ("softmax",),
        "moe.normalize_weights": lambda c: not parts.normalizes(c.moe),
        "moe.weight_scale": anything,
        "moe.num_expert_groups": anything,
        "moe.group_score": lambda c: c.moe.num_expert_groups == 1 or c.moe.group_score == "max",
        "moe.num_shared_experts": lambda c: c.moe.num_shared_experts > 0,
    },
    defaults=parts.LATENT_DEFAULTS
    | {
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "moe_intermediate_size": 1407,
    },
    nulls=("q_lora_rank",),
    refused=parts.LATENT_REFUSED
    | {
        "topk_method": ("greedy", "group_limited_greedy", None),
        "scoring_func": ("softmax", None),
        "norm_topk_prob": (False, None),
    },
)
