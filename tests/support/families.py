"""The families of the hub that are models of ours: one row each, a tiny model of transformers that has what the family
has of its own."""

from typing import Any

import torch
from torch import nn

from tests.support.hub_models import tiny_model

VOCAB = 300
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_MLA_YARN = _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None, "num_key_value_heads": 1},
    "qwen3_moe": {"decoder_sparse_step": 2, "num_key_value_heads": 1},
    "qwen2_moe": {"decoder_sparse_step": 1, "qkv_bias": True},
    "olmoe": {"num_key_value_heads": 1},
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": None,
        "rope_parameters": _MLA_YARN,
    },
    "deepseek_v3": {
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "rope_parameters": _MLA_YARN,
    },
    # Kimi-K2's and Moonlight's files: no groups; these have no small queries, either
    "moonlight": {"q_lora_rank": None, "num_nextn_predict_layers": 0, "n_shared_experts": 2},
    "kimi_k2": {"num_nextn_predict_layers": 0, "rope_parameters": _MLA_YARN},
    "glm4_moe": {
        "attention_bias": True,
        "num_key_value_heads": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "rope_parameters": _YARN | {"partial_rotary_factor": 0.5},
    },
    # with biases, and a window in its first layer
    "dots1": {
        "num_key_value_heads": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
    },
    "gpt_oss": {"num_key_value_heads": 1, "rope_parameters": _YARN | {"truncate": False}},
}
"""What differs from `tests.support.hub_models`, by family."""
_MODEL_TYPES = {"moonlight": "deepseek_v3", "kimi_k2": "deepseek_v3"}
"""Of those that transformers knows by another name."""


def family_model(name: str, *, seed: int, dtype: torch.dtype, top_k: int = 2, **sizes: int) -> nn.Module:
    """A tiny model of one family, four experts in a layer, in evaluation; norms, biases and sinks are random, too.

    Args:
        name: in `FAMILIES`.
        seed: of all weights.
        dtype: of the weights.
        top_k: experts per token; with all four there are no groups.
        sizes: other than those of the row.
    """
    changes = dict(FAMILIES[name])
    if top_k == 4 and "n_group" in changes:
        changes |= {"n_group": 1, "topk_group": 1}
    changes |= {"max_position_embeddings": 128, "eos_token_id": None} | sizes
    size = {"num_experts": 4, "top_k": top_k, "vocab_size": VOCAB}
    model = tiny_model(_MODEL_TYPES.get(name, name), seed=seed, **size, **changes).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() == 1 or key.endswith("bias"):
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise * (0.1 if "norm" in key else 0.3))
            if name == "gpt_oss" and key.endswith("gate_up_proj"):
                tensor.mul_(4)  # so that gates reach the clamp
    # and not the buffers: frequencies and balancing biases are FP32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
