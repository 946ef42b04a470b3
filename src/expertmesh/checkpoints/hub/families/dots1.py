"""Dots1: ordinary attention with norms on queries and keys of each head, the mixture of DeepSeek-V3."""

from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import HubFamily, Values, anything
from expertmesh.models.gpt.config import ModelConfig


def _read(v: Values) -> dict[str, Any]:
    layers, first, bias = v["num_hidden_layers"], v["max_window_layers"], v["attention_bias"]
    kinds = parts.layer_types(layers, 1)[:first] + parts.layer_types(layers, None)[first:]
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        **parts.windows(v, v.get("layer_types") or kinds, parts.window_in_force(v)),
        **parts.sigmoid_mixture(v),
    }


def _write(c: ModelConfig) -> dict[str, Any]:
    every = c.full_attention_every if c.sliding_window else 1
    return parts.write_shared_mixture(c) | {
        "attention_bias": c.qkv_bias,
        "sliding_window": c.sliding_window,
        "layer_types": parts.layer_types(c.num_layers, every),
    }


DOTS1 = HubFamily(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    title="Dots1",
    read=_read,
    write=_write,
    fits=parts.SIGMOID
    | {
        "qk_norm": (True,),
        "qkv_bias": anything,
        "out_bias": lambda c: c.out_bias == c.qkv_bias,
        "sliding_window": anything,
        "full_attention_every": anything,
    },
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    nulls=("sliding_window",),
)
