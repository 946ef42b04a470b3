"""The rows of the table of experts in transformers: tiny experts of every kind, and tiny whole models."""

import copy
import importlib
from types import SimpleNamespace

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from expertmesh.integrations.transformers import apply

D, F, E, K = 24, 16, 5, 3

EXPERTS = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "qwen2_moe": "Qwen2MoeExperts",
    "olmoe": "OlmoeExperts",
    "deepseek_v2": "DeepseekV2Experts",
    "deepseek_v3": "DeepseekV3Experts",
    "glm4_moe": "Glm4MoeExperts",
    "gpt_oss": "GptOssExperts",
    "minimax_m3_vl": "MiniMaxM3VLExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "nemotron_h": "NemotronHExperts",
    "aria": "AriaExperts",
    "muse_spark": "MuseSparkExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
}
FUSED = {
    "mixtral": "swiglu",
    "qwen3_moe": "swiglu",
    "qwen2_moe": "swiglu",
    "olmoe": "swiglu",
    "deepseek_v2": "swiglu",
    "deepseek_v3": "swiglu",
    "glm4_moe": "swiglu",
    "nemotron_h": "relu2",
}


def tiny_experts(name, dtype=torch.float32, scale=0.3, num_experts=E):
    """Experts of one family with random weights."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = SimpleNamespace(
        hidden_size=D,
        moe_hidden_size=D,
        intermediate_size=F,
        moe_intermediate_size=F,
        moe_latent_size=None,
        hidden_act="silu",
        mlp_hidden_act="relu2",
        swiglu_alpha=1.702,
        swiglu_limit=0.7,
        post_norm_eps=1e-6,
        _experts_implementation="eager",
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts),
    )
    experts = getattr(module, EXPERTS[name])(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return experts.to(dtype)


_COMMON = {
    "vocab_size": 61,
    "hidden_size": D,
    "intermediate_size": 40,
    "moe_intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
}
MODELS = {
    "mixtral": {"intermediate_size": F},
    "qwen3_moe": {"head_dim": 12, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 20, "norm_topk_prob": False},
    "olmoe": {"intermediate_size": F},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "glm4_moe": {
        "head_dim": 12,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "use_qk_norm": True,
    },
    "gpt_oss": {"head_dim": 12, "intermediate_size": F, "sliding_window": 8},
    "dots1": {
        "attention_bias": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_model(name, *, num_experts=E, top_k=K, dtype=torch.float32, seed=5, **changes):
    """A whole model of one family with random weights that make well-separated choices."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    given = _COMMON | MODELS.get(name, {}) | dict.fromkeys(counts, num_experts) | changes
    known = CONFIG_MAPPING[name]()
    given = {k: v for k, v in given.items() if hasattr(known, k) or k == "attn_implementation"}
    config = CONFIG_MAPPING[name](**given, num_experts_per_tok=top_k)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def logits_and_gradients(model, ids, implementation="expertmesh", dtype=None, *, turned=False):
    """Of a copy; turned: of the same texts in the opposite order, so that sums over them round differently."""
    model = copy.deepcopy(model).to(dtype or model.dtype)
    if implementation == "expertmesh":
        apply(model)
    else:
        model.set_experts_implementation(implementation)
    logits = model(ids.flip(0) if turned else ids).logits
    logits = logits.flip(0) if turned else logits
    logits.backward(torch.linspace(-1, 1, logits.numel()).view_as(logits).to(logits.dtype))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | found
