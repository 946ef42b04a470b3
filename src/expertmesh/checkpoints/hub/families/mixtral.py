"""Mixtral: grouped-query attention, experts in every layer, weights that sum to one."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.families.glm4_moe import AS_GLM, WHOLE_GLM
from expertmesh.checkpoints.hub.families.qwen3_moe import AS_QWEN
from expertmesh.checkpoints.hub.family import HubFamily, Values, anything
from expertmesh.models.gpt.config import ModelConfig


def _read(v: Values) -> dict[str, Any]:
    kinds = parts.layer_types(v["num_hidden_layers"], None)
    moe = parts.mixture(v, "num_local_experts", "intermediate_size", normalizes=True)
    return parts.windows(v, kinds, parts.window_in_force(v)) | {"moe": moe}


def _write(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "sliding_window": c.sliding_window,
        "router_aux_loss_coef": parts.loss_coefficient(c.moe, c.num_moe_layers),
    }


def _is_undivided(c: ModelConfig) -> bool:
    return c.moe.top_k == 1 and c.moe.normalize_weights == "auto" and not parts.normalizes(c.moe)


MIXTRAL = HubFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    read=_read,
    write=_write,
    fits={
        "sliding_window": anything,
        "moe.top_k": lambda c: not _is_undivided(c),
        "moe.normalize_weights": lambda c: parts.normalizes(c.moe) or _is_undivided(c),
    },
    ways={
        "moe.top_k": f"its one weight is divided by nothing here, and is 1 in Mixtral; {AS_QWEN}",
        **dict.fromkeys(("moe_every", "moe.normalize_weights"), AS_QWEN),
        **dict.fromkeys(("moe.score_function", "moe.bias_update_rate"), WHOLE_GLM),
        **dict.fromkeys(("qkv_bias", "rope_fraction", "first_dense_layers"), AS_GLM),
        **dict.fromkeys(("moe.weight_scale", "moe.num_expert_groups"), AS_GLM),
        "moe.num_shared_experts": AS_GLM,
    },
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1e6,
    },
    renamed=(
        (".mlp.", ".block_sparse_moe."),
        ("gate_proj", "w1"),
        ("up_proj", "w3"),
        ("down_proj", "w2"),
    ),
)
