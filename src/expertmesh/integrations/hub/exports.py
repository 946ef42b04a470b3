"""A model of ours as the hub describes one: under which architecture it goes out, and its config.json."""

import logging
from typing import Any, NamedTuple

from expertmesh.checkpoints.hub.configs import (
    ACTIVATIONS,
    FAMILIES,
    YARN,
    HubFamily,
    layer_types,
)
from expertmesh.config.moe import MoEConfig
from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.errors import ConfigError, named
from expertmesh.models.gpt.config import ModelConfig

_log = logging.getLogger("expertmesh.integrations")


def _normalizes(moe: MoEConfig) -> bool:
    """Whether a token's weights sum to one, of the routers that go out.

    A softmax over the chosen logits is the one over all of them, divided by its sum over the chosen.
    """
    if moe.score_function == "softmax_after_topk":
        return True
    ours = moe.normalize_weights
    return moe.top_k > 1 if ours == "auto" else ours != "none"


def loss_coefficient(config: ModelConfig) -> float:
    """transformers' `router_aux_loss_coef` of the weight of our balance loss; see `configs.model_config`."""
    moe = config.moe
    if moe.balance_loss == "none":
        return 0.0
    coef = moe.aux_loss_weight * config.num_moe_layers / moe.top_k
    return float(f"{coef:.12g}")  # 0.001 there and back is 0.001


def _mixtral(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "sliding_window": None,
        "router_aux_loss_coef": loss_coefficient(c),
    }


def _qwen3(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": c.moe.num_experts[0],
        "moe_intermediate_size": c.moe.hidden_dim,
        "intermediate_size": c.ffn_hidden_dim,
        "decoder_sparse_step": c.moe_every,
        "mlp_only_layers": list(range(c.first_dense_layers)),
        "norm_topk_prob": _normalizes(c.moe),
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "router_aux_loss_coef": loss_coefficient(c),
    }


def _qwen2(c: ModelConfig) -> dict[str, Any]:
    values = _qwen3(c)
    del values["attention_bias"]
    shared = c.moe.num_shared_experts * c.moe.hidden_dim
    return values | {
        "qkv_bias": c.qkv_bias,
        "shared_expert_intermediate_size": c.moe.shared_hidden_dim or shared,
    }


def _olmoe(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "norm_topk_prob": _normalizes(c.moe),
        "attention_bias": False,
        "clip_qkv": None,
        "router_aux_loss_coef": loss_coefficient(c),
    }


def _glm4(c: ModelConfig) -> dict[str, Any]:
    moe = c.moe
    return {
        "n_routed_experts": moe.num_experts[0],
        "moe_intermediate_size": moe.hidden_dim,
        "intermediate_size": c.ffn_hidden_dim,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": c.first_dense_layers,
        "n_group": moe.num_expert_groups,
        "topk_group": moe.num_limited_groups,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": moe.weight_scale,
        "norm_topk_prob": _normalizes(moe),
        "attention_bias": c.qkv_bias,
        "use_qk_norm": c.qk_norm,
        "partial_rotary_factor": c.rope_fraction,
    }


def _deepseek(c: ModelConfig) -> dict[str, Any]:
    moe, latent = c.moe, c.latent
    is_v3 = moe.score_function == "sigmoid"
    groups: dict[str, Any] = {
        "n_group": moe.num_expert_groups,
        "topk_group": moe.num_limited_groups,
    }
    if not is_v3:
        grouped = moe.num_expert_groups > 1
        groups["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    return {
        **{name: getattr(latent, name) for name in _LATENT},
        "num_key_value_heads": c.num_heads,
        # that which turns, as transformers has it
        "head_dim": latent.qk_rope_head_dim,
        "n_routed_experts": moe.num_experts[0],
        "moe_intermediate_size": moe.hidden_dim,
        "intermediate_size": c.ffn_hidden_dim,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": c.first_dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": moe.weight_scale,
        "norm_topk_prob": is_v3 and _normalizes(moe),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "attention_bias": False,
        "rope_interleave": latent.interleaved,
        **groups,
        **({"num_nextn_predict_layers": 0} if is_v3 else {}),
    }


def _gpt_oss(c: ModelConfig) -> dict[str, Any]:
    every = c.full_attention_every if c.sliding_window else 1
    return {
        "num_local_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "hidden_act": "silu",
        "attention_bias": c.qkv_bias,
        "sliding_window": c.sliding_window,
        "layer_types": layer_types(c.num_layers, every),
        "swiglu_limit": CLAMP_LIMIT,
        "swiglu_alpha": CLAMP_SLOPE,
        "router_aux_loss_coef": loss_coefficient(c),
    }


_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPORTS = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3,
    "qwen2_moe": _qwen2,
    "olmoe": _olmoe,
    "glm4_moe": _glm4,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def export_family(config: ModelConfig) -> HubFamily:
    """The architecture under whose names a model of ours goes out.

    Raises:
        ConfigError: no architecture of the hub computes what an option of ours asks for; names it.
    """
    moe = config.moe
    is_olmoe = config.qk_norm and config.qk_norm_scope == "projection"
    is_oss = config.sinks or config.activation == "clamped_swiglu"
    gated = moe.shared_gate and moe.score_function != "sigmoid"
    names, rules = "Mixtral, Qwen3-MoE and GLM-4-MoE have", _rules
    if config.is_latent:
        names, rules = "DeepSeek-V2 and V3 have", _latent_rules
    elif is_oss:
        names, rules = "gpt-oss, the one with sinks and clamped_swiglu, has", _gpt_oss_rules
    elif is_olmoe:
        names, rules = "OLMoE, the one with such a qk_norm_scope, has", _olmoe_rules
    elif gated:
        names, rules = "Qwen2-MoE, the one with such a shared_gate, has", _qwen2_rules
    for rule in [*rules(config), *([] if is_oss else _rules_of_attention(config))]:
        if not rule.holds:
            raise ConfigError(
                f"model.{rule.name}",
                rule.value,
                f"{names} nothing like it together with the model's other options",
                f"{rule.way}keep the model in expertmesh, or train one without it",
            )
    if config.is_latent:
        return FAMILIES["deepseek_v3" if moe.score_function == "sigmoid" else "deepseek_v2"]
    if is_oss:
        return FAMILIES["gpt_oss"]
    if is_olmoe or gated:
        return FAMILIES["olmoe" if is_olmoe else "qwen2_moe"]
    if moe.score_function == "sigmoid" or config.qkv_bias:
        return FAMILIES["glm4_moe"]
    return FAMILIES["qwen3_moe" if config.qk_norm else "mixtral"]


def hub_config(config: ModelConfig, family: HubFamily, *, dtype: str) -> dict[str, Any]:
    """The config.json of a model of ours.

    Args:
        config: the model.
        family: from `export_family`.
        dtype: of the written weights, as torch names it.
    """
    turning = {"partial_rotary_factor": config.rope_fraction}
    rope: dict[str, Any] = {"rope_theta": config.rope_base, "rope_type": "default"}
    if config.rope_scaling.factor > 1:
        scaling = config.rope_scaling
        rope |= {name: getattr(scaling, ours) for name, ours in YARN.items()} | {
            "rope_type": "yarn"
        }
        rope = {name: value for name, value in rope.items() if value not in (None, 0.0)}
        rope["truncate"] = scaling.truncate
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(config.activation),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_base,
        "rope_parameters": rope | (turning if family.model_type == "glm4_moe" else {}),
        "initializer_range": config.init_std,
        "num_experts_per_tok": config.moe.top_k,
        "attention_dropout": 0.0,
        "use_cache": True,
        **_EXPORTS[family.model_type](config),
    }


def left_out(config: ModelConfig, family: HubFamily) -> list[str]:
    """Our options that a config.json of the family has no place for, as `name=value`; they count in training only."""
    moe = config.moe
    names = [
        *("z_loss_weight", "input_jitter", "input_dropout", "expert_output_masking"),
        *("router_noise", "capacity_factor", "routing_group_size", "balance_loss_scope"),
    ]
    fields = MoEConfig.model_fields
    found = [name for name in names if getattr(moe, name) != fields[name].default]
    if moe.balance_loss not in ("switch", "none"):
        found.append("balance_loss")
    if (
        "router_aux_loss_coef" not in family.defaults
        and moe.aux_loss_weight
        and moe.balance_loss != "none"
    ):
        found.append("aux_loss_weight")
    return [f"moe.{name}={getattr(moe, name)}" for name in found]


def say_left_out(config: ModelConfig, family: HubFamily) -> None:
    """Say what `left_out` found, in one line."""
    if found := left_out(config, family):
        _log.warning(
            "%s has no place for model.%s: counts in training only, and is left out",
            family.architecture,
            ", model.".join(found),
        )


class _Rule(NamedTuple):
    """What a model that goes out must fulfil.

    Attributes:
        name: of the option that the user would change, below `model.`.
        value: which it has.
        holds: whether it does.
        way: out, in words, where there is one.
    """

    name: str
    value: Any
    holds: bool
    way: str = ""


_AS_QWEN = f"one with {named('model.qk_norm', True)} goes out as Qwen3-MoE, which has it; "
_GLM = (
    f"{named('model.moe.score_function', 'sigmoid')}, and {named('model.moe.bias_update_rate')} and "
    f"{named('model.moe.num_shared_experts')} above 0"
)
_AS_GLM = f"one with {_GLM} goes out as GLM-4-MoE, which has it; "
_WHOLE_GLM = f"GLM-4-MoE has together {_GLM}; "


def _latent_rules(config: ModelConfig) -> list[_Rule]:
    """Those of a model with latent attention."""
    moe = config.moe
    is_v3 = moe.score_function == "sigmoid"
    grouped = moe.num_expert_groups > 1
    score = "top2_sum" if is_v3 else "max"
    return [
        _Rule("moe.num_experts", moe.num_experts, len(set(moe.num_experts)) == 1),
        _Rule("activation", config.activation, config.activation in ACTIVATIONS.values()),
        _Rule("moe_every", config.moe_every, config.moe_every == 1),
        _Rule("latent.interleaved", False, is_v3 or config.latent.interleaved),
        _Rule("moe.router", moe.router, moe.router == "topk"),
        _Rule("moe.score_function", moe.score_function, moe.score_function != "softmax_after_topk"),
        _Rule("moe.bias_update_rate", moe.bias_update_rate, is_v3 == (moe.bias_update_rate > 0)),
        _Rule("moe.normalize_weights", moe.normalize_weights, is_v3 or not _normalizes(moe)),
        _Rule("moe.group_score", moe.group_score, not grouped or moe.group_score == score),
        _Rule("moe.num_shared_experts", moe.num_shared_experts, moe.num_shared_experts > 0),
        *_rules_of_all(moe),
    ]


def _gpt_oss_rules(config: ModelConfig) -> list[_Rule]:
    """Those of a model with sinks, or with its activation."""
    moe, every = config.moe, config.full_attention_every
    return [
        _Rule("moe.num_experts", moe.num_experts, len(set(moe.num_experts)) == 1),
        _Rule("activation", config.activation, config.activation == "clamped_swiglu"),
        _Rule("sinks", config.sinks, config.sinks),
        _Rule("out_bias", config.out_bias, config.out_bias == config.qkv_bias),
        _Rule("full_attention_every", every, every is None or every <= config.num_layers),
        _Rule("qk_norm", config.qk_norm, not config.qk_norm),
        _Rule("rope_fraction", config.rope_fraction, config.rope_fraction == 1),
        _Rule("first_dense_layers", config.first_dense_layers, not config.first_dense_layers),
        _Rule("moe_every", config.moe_every, config.moe_every == 1),
        _Rule("moe.router", moe.router, moe.router == "topk"),
        _Rule(
            *("moe.score_function", moe.score_function),
            moe.score_function == "softmax_after_topk",
        ),
        _Rule("moe.bias", moe.bias, moe.bias),
        _Rule("moe.router_bias", moe.router_bias, moe.router_bias),
        _Rule("moe.bias_update_rate", moe.bias_update_rate, not moe.bias_update_rate),
        _Rule("moe.weight_scale", moe.weight_scale, moe.weight_scale == 1),
        _Rule("moe.num_expert_groups", moe.num_expert_groups, moe.num_expert_groups == 1),
        _Rule("moe.num_shared_experts", moe.num_shared_experts, not moe.num_shared_experts),
        *(rule for rule in _rules_of_all(moe) if rule.name not in ("moe.bias", "moe.router_bias")),
    ]


def _rules_of_attention(config: ModelConfig) -> list[_Rule]:
    """What gpt-oss alone has."""
    names = ("out_bias", "sinks", "sliding_window")
    return [_Rule(name, getattr(config, name), not getattr(config, name)) for name in names]


def _olmoe_rules(config: ModelConfig) -> list[_Rule]:
    """Those of a model whose norm of queries and keys is over all heads."""
    moe, head = config.moe, config.head_size
    return [
        *_rules_of_softmax(config),
        _Rule("head_dim", head, head * config.num_heads == config.dim),
        _Rule("qkv_bias", config.qkv_bias, not config.qkv_bias),
        _Rule("first_dense_layers", config.first_dense_layers, not config.first_dense_layers),
        _Rule("moe_every", config.moe_every, config.moe_every == 1),
        _Rule("moe.num_shared_experts", moe.num_shared_experts, not moe.num_shared_experts),
        *_rules_of_all(moe),
    ]


def _qwen2_rules(config: ModelConfig) -> list[_Rule]:
    """Those of a model with a gate on its shared experts."""
    gated = ("moe.shared_hidden_dim", "moe.shared_gate")
    return [
        *_rules_of_softmax(config),
        _Rule("qk_norm", config.qk_norm, not config.qk_norm),
        *(rule for rule in _rules_of_all(config.moe) if rule.name not in gated),
    ]


def _rules_of_softmax(config: ModelConfig) -> list[_Rule]:
    """What both have, with weights that are divided or not."""
    moe = config.moe
    return [
        _Rule("moe.num_experts", moe.num_experts, len(set(moe.num_experts)) == 1),
        _Rule("activation", config.activation, config.activation in ACTIVATIONS.values()),
        _Rule("rope_fraction", config.rope_fraction, config.rope_fraction == 1),
        _Rule("moe.router", moe.router, moe.router == "topk"),
        _Rule("moe.score_function", moe.score_function, moe.score_function != "sigmoid"),
        _Rule("moe.bias_update_rate", moe.bias_update_rate, not moe.bias_update_rate),
        _Rule("moe.weight_scale", moe.weight_scale, moe.weight_scale == 1),
        _Rule("moe.num_expert_groups", moe.num_expert_groups, moe.num_expert_groups == 1),
    ]


def _rules(config: ModelConfig) -> list[_Rule]:
    """All of them, those first whose options decide on the architecture."""
    moe = config.moe
    glm = moe.score_function == "sigmoid" and moe.bias_update_rate > 0
    divided = _normalizes(moe) or glm or config.qk_norm
    one = moe.top_k == 1 and moe.normalize_weights == "auto"
    softmax = moe.score_function != "sigmoid"
    found = [
        _Rule("moe.num_experts", moe.num_experts, len(set(moe.num_experts)) == 1),
        _Rule("activation", config.activation, config.activation in ACTIVATIONS.values()),
        _Rule("qk_norm_scope", config.qk_norm_scope, config.qk_norm_scope == "head"),
        _Rule("qkv_bias", config.qkv_bias, glm or not config.qkv_bias, _AS_GLM),
        _Rule("rope_fraction", config.rope_fraction, glm or config.rope_fraction == 1, _AS_GLM),
        _Rule(
            *("first_dense_layers", config.first_dense_layers),
            glm or config.qk_norm or not config.first_dense_layers,
            _AS_GLM,
        ),
        _Rule(
            *("moe_every", config.moe_every),
            config.moe_every == 1 or (config.qk_norm and not glm),
            "" if glm else _AS_QWEN,
        ),
        _Rule("moe.router", moe.router, moe.router == "topk"),
        _Rule("moe.score_function", moe.score_function, softmax or glm, _WHOLE_GLM),
        _Rule(
            *("moe.bias_update_rate", moe.bias_update_rate),
            glm or not moe.bias_update_rate,
            _WHOLE_GLM,
        ),
        _Rule(
            "moe.top_k" if one else "moe.normalize_weights",
            1 if one else moe.normalize_weights,
            divided,
            ("its one weight is divided by nothing here, and is 1 in Mixtral; " if one else "")
            + _AS_QWEN,
        ),
        _Rule("moe.weight_scale", moe.weight_scale, glm or moe.weight_scale == 1, _AS_GLM),
        _Rule(
            *("moe.num_expert_groups", moe.num_expert_groups),
            glm or moe.num_expert_groups == 1,
            _AS_GLM,
        ),
        _Rule(
            *("moe.num_shared_experts", moe.num_shared_experts),
            glm == bool(moe.num_shared_experts),
            _WHOLE_GLM if glm else _AS_GLM,
        ),
        _Rule("moe.group_score", moe.group_score, moe.group_score == "top2_sum"),
    ]
    return found + _rules_of_all(moe)


def _rules_of_all(moe: MoEConfig) -> list[_Rule]:
    """What no family has."""
    shared = moe.num_shared_experts * moe.hidden_dim
    found = [
        _Rule(
            *("moe.shared_hidden_dim", moe.shared_hidden_dim),
            moe.shared_hidden_dim in (None, shared),
        ),
        _Rule("moe.shared_gate", moe.shared_gate, not moe.shared_gate),
        _Rule("moe.logit_temperature", moe.logit_temperature, moe.logit_temperature == 1),
        _Rule("moe.residual", moe.residual, not moe.residual),
        _Rule("moe.bias", moe.bias, not moe.bias),
        _Rule("moe.router_bias", moe.router_bias, not moe.router_bias),
    ]
    capacities = ("eval_capacity_factor", "max_capacity_factor")
    return found + [_Rule(f"moe.{n}", getattr(moe, n), getattr(moe, n) is None) for n in capacities]
