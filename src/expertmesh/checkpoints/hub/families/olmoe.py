"""OLMoE: norms over all queries and over all keys of a token."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Values
from expertmesh.models.gpt.config import ModelConfig


def _read(v: Values) -> dict[str, Any]:
    moe = parts.mixture(v, "num_experts", "intermediate_size", normalizes=v["norm_topk_prob"])
    return {"qk_norm": True, "qk_norm_scope": "projection", "moe": moe}


def _write(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "norm_topk_prob": parts.normalizes(c.moe),
        "attention_bias": False,
        "clip_qkv": None,
        "router_aux_loss_coef": parts.loss_coefficient(c.moe, c.num_moe_layers),
    }


OLMOE = HubFamily(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    read=_read,
    write=_write,
    fits={
        "qk_norm": (True,),
        "qk_norm_scope": ("projection",),
        "head_dim": lambda c: c.head_size * c.num_heads == c.dim,
    },
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
    },
    refused={"attention_bias": (False, None), "clip_qkv": (None,)},
)
