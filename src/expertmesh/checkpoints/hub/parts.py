"""Parts of a config.json that several architectures share, to options of our GPT and back. Never imports torch."""

from collections.abc import Sequence
from typing import Any

from expertmesh.checkpoints.hub.family import Fits, Values, anything, other_model
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import LayerChoices
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig

BIAS_RATE = 1e-3
"""DeepSeek's step of the balancing bias; no config.json has it."""


def rope(v: Values) -> Values:
    """Options of the rotary positions in a config.json."""
    found: Values = v.get("rope_scaling") or v.get("rope_parameters") or {}
    return found


def mixture(v: Values, experts: str, hidden: str, *, normalizes: bool) -> dict[str, Any]:
    """Options of our `moe` that all architectures have."""
    return {
        "num_experts": (v[experts] if experts in v else v["num_local_experts"],),
        "top_k": v["num_experts_per_tok"],
        "hidden_dim": v[hidden],
        "normalize_weights": "topk" if normalizes else "none",
    }


def normalizes(moe: MoEConfig) -> bool:
    """Whether a token's routing weights sum to one, for routers that can be exported.

    A softmax over the chosen logits equals the softmax over all logits divided by its sum over the chosen.
    """
    if moe.score_function == "softmax_after_topk":
        return True
    ours = moe.normalize_weights
    return moe.top_k > 1 if ours == "auto" else ours != "none"


def loss_coefficient(moe: LayerChoices, num_layers: int) -> float:
    """transformers' `router_aux_loss_coef` from the weight of our balance loss; see `configs.model_config`.

    Returns:
        0 for "none", and for "importance_load", which no weight makes transformers' loss.
    """
    if moe.balance_loss in ("none", "importance_load"):
        return 0.0
    # theirs is K at balance and a mean over the layers, ours is 1 in each layer
    coef = moe.aux_loss_weight * num_layers / moe.top_k
    return float(f"{coef:.12g}")  # 0.001 there and back is 0.001


_NOT_OF_THE_HUB = (
    *("z_loss_weight", "input_jitter", "input_dropout", "expert_output_masking"),
    *("router_noise", "capacity_factor", "routing_group_size", "balance_loss_scope"),
)


def training_only(moe: LayerChoices, *, has_balance_loss: bool) -> list[str]:
    """Options in use that count in training only and that no config.json of the hub has, as `name=value`."""
    fields = LayerChoices.model_fields
    found = [name for name in _NOT_OF_THE_HUB if getattr(moe, name) != fields[name].default]
    if moe.balance_loss not in ("switch", "none"):
        found.append("balance_loss")
    if not has_balance_loss and moe.aux_loss_weight and moe.balance_loss != "none":
        found.append("aux_loss_weight")
    return [f"{name}={getattr(moe, name)}" for name in found]


SIGMOID: dict[str, Fits] = {
    "first_dense_layers": anything,
    "moe.score_function": ("sigmoid",),
    "moe.bias_update_rate": lambda c: c.moe.bias_update_rate > 0,
    "moe.weight_scale": anything,
    "moe.num_expert_groups": anything,
    "moe.num_shared_experts": lambda c: c.moe.num_shared_experts > 0,
}
"""`HubFamily.fits` of the mixture of DeepSeek-V3."""


def sigmoid_mixture(v: Values) -> dict[str, Any]:
    """Our options of DeepSeek-V3's layers: dense first ones; sigmoid scores, balancing bias, groups by their two best,
    shared experts."""
    moe = mixture(v, "n_routed_experts", "moe_intermediate_size", normalizes=v["norm_topk_prob"])
    moe |= {
        "score_function": "sigmoid",
        "num_expert_groups": v["n_group"],
        "num_limited_groups": v["topk_group"] if v["n_group"] > 1 else 1,
        "weight_scale": v["routed_scaling_factor"],
        "num_shared_experts": v["n_shared_experts"] or 0,
        "bias_update_rate": BIAS_RATE,
    }
    return {"first_dense_layers": v["first_k_dense_replace"], "moe": moe}


def write_shared_mixture(c: ModelConfig) -> dict[str, Any]:
    """Options of config.json for dense layers and experts of the DeepSeek architectures and their relatives."""
    moe = c.moe
    return {
        "n_routed_experts": moe.num_experts[0],
        "moe_intermediate_size": moe.hidden_dim,
        "intermediate_size": c.ffn_hidden_dim,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": c.first_dense_layers,
        "n_group": moe.num_expert_groups,
        "topk_group": moe.num_limited_groups,
        "routed_scaling_factor": moe.weight_scale,
        "norm_topk_prob": normalizes(moe),
    }


LATENT_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LATENT_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1,),
    "ep_size": (1,),
}
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def latent(v: Values) -> dict[str, Any]:
    """Our options of multi-head latent attention."""
    sizes = {name: v[name] for name in _LATENT}  # q_lora_rank null: queries come from the token
    interleaved = bool(v.get("rope_interleave", True))  # null is false to transformers
    return {"latent": sizes | {"interleaved": interleaved}, "num_kv_heads": None, "head_dim": None}


def write_latent(c: ModelConfig) -> dict[str, Any]:
    """Options of config.json for multi-head latent attention, and `moe_layer_freq`."""
    return {
        **{name: getattr(c.latent, name) for name in _LATENT},
        "num_key_value_heads": c.num_heads,
        "head_dim": c.latent.qk_rope_head_dim,  # the rotary part, as in transformers
        "attention_bias": False,
        "rope_interleave": c.latent.interleaved,
        "moe_layer_freq": 1,
    }


QWEN: dict[str, Any] = {
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
"""Defaults of a config.json of Qwen."""


def qwen(v: Values) -> dict[str, Any]:
    """Our options of Qwen's dense layers and experts."""
    return {
        "moe_every": v["decoder_sparse_step"],
        "first_dense_layers": _first_dense(v),
        "moe": mixture(v, "num_experts", "moe_intermediate_size", normalizes=v["norm_topk_prob"]),
    }


def write_qwen(c: ModelConfig) -> dict[str, Any]:
    """Options of config.json for Qwen's dense layers, experts and windows."""
    return {
        "num_experts": c.moe.num_experts[0],
        "moe_intermediate_size": c.moe.hidden_dim,
        "intermediate_size": c.ffn_hidden_dim,
        "decoder_sparse_step": c.moe_every,
        "mlp_only_layers": list(range(c.first_dense_layers)),
        "norm_topk_prob": normalizes(c.moe),
        "sliding_window": c.sliding_window,
        "use_sliding_window": c.sliding_window is not None,
        "router_aux_loss_coef": loss_coefficient(c.moe, c.num_moe_layers),
    }


def _first_dense(v: Values) -> int:
    """`first_dense_layers` that is equivalent to `mlp_only_layers`."""
    without, step = v.get("mlp_only_layers") or [], v["decoder_sparse_step"]
    if not without or not isinstance(step, int) or step < 1:
        return 0
    possible = range(step - 1, v["num_hidden_layers"], step)
    sparse = [i for i in possible if i not in without]
    skipped = len(possible) - len(sparse)
    if sparse != list(possible[skipped:]):
        wanted = "dense layers that are the first ones"
        raise other_model(f"mlp_only_layers={without!r}", v["model_type"], wanted)
    return skipped * step


def layer_types(num_layers: int, every: int | None) -> list[str]:
    """The hub's `layer_types` where every n-th layer has full attention, the others a window."""
    sees_all = [every is not None and i % every == every - 1 for i in range(num_layers)]
    return ["full_attention" if whole else "sliding_attention" for whole in sees_all]


def windows(v: Values, kinds: Sequence[str], window: Any) -> dict[str, Any]:
    """`sliding_window` and `full_attention_every` that make the given kinds of attention."""
    layers = v["num_hidden_layers"]
    if window is None or list(kinds) == layer_types(layers, 1):
        return {}
    for every in (*range(2, layers + 1), None):
        if list(kinds) == layer_types(layers, every):
            return {"sliding_window": window, "full_attention_every": every}
    raise ConfigError(
        f"layer_types={list(kinds)!r}: a GPT of expertmesh has windows in all layers, or in all but every n-th of "
        f"{layers}; use another model"
    )


def window_in_force(v: Values) -> Any:
    """`sliding_window`, or None where it is at least the maximum length."""
    window, longest = v.get("sliding_window"), v["max_position_embeddings"]
    is_idle = isinstance(window, int) and isinstance(longest, int) and window >= longest
    return None if is_idle else window
