"""gpt-oss: sinks, windows in every other layer, biases everywhere, clamped gates, experts that are one tensor."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from expertmesh.checkpoints.box import whole_box
from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Piece, Values, anything
from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.spec.model_spec import Parameter


def _read(v: Values) -> dict[str, Any]:
    kinds = v.get("layer_types") or parts.layer_types(v["num_hidden_layers"], 2)
    moe = parts.mixture(v, "num_local_experts", "intermediate_size", normalizes=True)
    moe |= {"score_function": "softmax_after_topk", "bias": True, "router_bias": True}
    return {
        "activation": "clamped_swiglu",
        "qkv_bias": v["attention_bias"],
        "out_bias": v["attention_bias"],
        "sinks": True,
        "moe": moe,
        **parts.windows(v, kinds, v["sliding_window"]),
    }


def _write(c: ModelConfig) -> dict[str, Any]:
    every = c.full_attention_every if c.sliding_window else 1
    return {
        "num_local_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "hidden_act": "silu",
        "attention_bias": c.qkv_bias,
        "sliding_window": c.sliding_window,
        "layer_types": parts.layer_types(c.num_layers, every),
        "swiglu_limit": CLAMP_LIMIT,
        "swiglu_alpha": CLAMP_SLOPE,
        "router_aux_loss_coef": parts.loss_coefficient(c.moe, c.num_moe_layers),
    }


def _experts(one: Parameter, names: tuple[str, ...]) -> Iterator[Piece]:
    """Pieces of experts that are one tensor in the files: inputs before outputs, gate and up rows alternating, `_bias`
    behind the name."""
    module, _, kind = names[0].replace("{expert}.", "").rpartition(".")
    theirs = module.replace("gate_proj", "gate_up_proj") + ("_bias" if kind == "bias" else "")
    E, *sizes = one.shape
    G = sizes.pop(0) if "branch" in one.axes else 1
    inside = whole_box(sizes)
    whole = (E, *reversed([sizes[0] * G, *sizes[1:]]))
    for e, g in product(range(E), range(G)):
        lead = slice(e, e + 1)
        branch = (slice(g, g + 1),) if "branch" in one.axes else ()
        there = (lead, *inside[1:], slice(g, sizes[0] * G, G))
        ours = (lead, *branch, *inside)
        yield Piece(one.name, ours, theirs, there, whole, is_turned=len(sizes) == 2)


GPT_OSS = HubFamily(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    title="gpt-oss",
    read=_read,
    write=_write,
    fits={
        "activation": ("clamped_swiglu",),
        "sinks": (True,),
        "sliding_window": anything,
        "full_attention_every": lambda c: (c.full_attention_every or 0) <= c.num_layers,
        "qkv_bias": anything,
        "out_bias": lambda c: c.out_bias == c.qkv_bias,
        "moe.score_function": ("softmax_after_topk",),
        "moe.bias": (True,),
        "moe.router_bias": (True,),
    },
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    refused={
        "hidden_act": ("silu", None),
        "swiglu_limit": (CLAMP_LIMIT, None),
        "swiglu_alpha": (CLAMP_SLOPE, None),
    },
    renamed=((".mlp.gate.", ".mlp.router."),),
    experts=_experts,
)
