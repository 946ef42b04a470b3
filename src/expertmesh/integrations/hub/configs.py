"""What a hub model's config.json says, as options of our GPT, and back. Options that have no counterpart are refused by name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from expertmesh.config.model import ModelConfig, MoEConfig
from expertmesh.errors import ConfigError

_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
_BIAS_RATE = 1e-3
"""DeepSeek's step of the balancing bias, which no config.json tells."""

Values = Mapping[str, Any]


class HubFamily(NamedTuple):
    """One architecture of the hub.

    Attributes:
        model_type: its name in config.json.
        architecture: transformers' class.
        options: of config.json -> what our `ModelConfig` has beyond the common ones, its `moe` among them.
        refused: option of config.json -> the values with which our GPT computes the same.
        export: our `ModelConfig` -> what config.json has beyond the common; None: not exported under this name.
    """

    model_type: str
    architecture: str
    options: Callable[[Values], dict[str, Any]]
    refused: Mapping[str, tuple[Any, ...]]
    export: Callable[[ModelConfig], dict[str, Any]] | None


def _mixtral(v: Values) -> dict[str, Any]:
    return {
        "rope_base": _theta(v, default=1e6),
        "ffn_hidden_dim": v["intermediate_size"],
        "moe": _moe(v, "num_local_experts", "intermediate_size", normalize="topk"),
    }


def _qwen3(v: Values) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "moe_every": v.get("decoder_sparse_step", 1),
        "ffn_hidden_dim": v["intermediate_size"],
        "moe": _moe(v, "num_experts", "moe_intermediate_size", normalize=_normalize(v)),
    }


def _qwen2(v: Values) -> dict[str, Any]:
    moe = _moe(v, "num_experts", "moe_intermediate_size", normalize=_normalize(v))
    shared = {
        "shared_hidden_dim": v["shared_expert_intermediate_size"],
        "num_shared_experts": 1,
        "shared_gate": True,
    }
    return {
        "qkv_bias": v.get("qkv_bias", True),
        "moe_every": v.get("decoder_sparse_step", 1),
        "ffn_hidden_dim": v["intermediate_size"],
        "moe": moe | shared,
    }


def _olmoe(v: Values) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "qk_norm_scope": "projection",
        "ffn_hidden_dim": v["intermediate_size"],
        "moe": _moe(v, "num_experts", "intermediate_size", normalize=_normalize(v)),
    }


def _glm4(v: Values) -> dict[str, Any]:
    moe = _moe(
        v, "n_routed_experts", "moe_intermediate_size", normalize=_normalize(v, default=True)
    )
    groups = v.get("n_group", 1)
    return {
        "qk_norm": v.get("use_qk_norm", False),
        "qkv_bias": v.get("attention_bias", False),
        "rope_fraction": _rope(v).get("partial_rotary_factor", v.get("partial_rotary_factor", 0.5)),
        "first_dense_layers": v.get("first_k_dense_replace", 1),
        "ffn_hidden_dim": v["intermediate_size"],
        "moe": moe
        | {
            "score_function": "sigmoid",
            "num_expert_groups": groups,
            "num_limited_groups": v.get("topk_group", 1) if groups > 1 else 1,
            "weight_scale": v.get("routed_scaling_factor", 1.0),
            "num_shared_experts": v.get("n_shared_experts", 1),
            "bias_update_rate": _BIAS_RATE,
            "aux_loss_weight": 0.0,
        },
    }


def _moe(v: Values, experts: str, hidden: str, *, normalize: str) -> dict[str, Any]:
    return {
        # transformers 5 writes num_local_experts for all families, the hub's older files their own names
        "num_experts": (v[experts] if experts in v else v["num_local_experts"],),
        "top_k": v["num_experts_per_tok"],
        "hidden_dim": v[hidden],
        "normalize_weights": normalize,
        "aux_loss_weight": v.get("router_aux_loss_coef", 0.01),
    }


def _normalize(v: Values, *, default: bool = False) -> str:
    return "topk" if v.get("norm_topk_prob", default) else "none"


def _rope(v: Values) -> Values:
    return v.get("rope_parameters") or v.get("rope_scaling") or {}


def _theta(v: Values, *, default: float = 1e4) -> float:
    theta: float = _rope(v).get("rope_theta", v.get("rope_theta", default))
    return theta


def _normalizes(moe: MoEConfig) -> bool:
    """Whether a token's weights are divided by their sum, of the routers that go out."""
    ours = moe.normalize_weights
    return moe.top_k > 1 if ours == "auto" else ours != "none"


def _export_mixtral(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": c.moe.num_experts[0],
        "intermediate_size": c.moe.hidden_dim,
        "sliding_window": None,
        "router_aux_loss_coef": c.moe.aux_loss_weight,
    }


def _export_qwen3(c: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": c.moe.num_experts[0],
        "moe_intermediate_size": c.moe.hidden_dim,
        "intermediate_size": c.ffn_hidden_dim,
        "decoder_sparse_step": c.moe_every,
        "mlp_only_layers": [],
        "norm_topk_prob": _normalizes(c.moe),
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "router_aux_loss_coef": c.moe.aux_loss_weight,
    }


def _export_glm4(c: ModelConfig) -> dict[str, Any]:
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


_NO_WINDOW = {"sliding_window": (None,)}
_PLAIN = {"attention_bias": (False,), "clip_qkv": (None,)}

FAMILIES = {
    family.model_type: family
    for family in (
        HubFamily("mixtral", "MixtralForCausalLM", _mixtral, _NO_WINDOW, _export_mixtral),
        HubFamily(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _qwen3,
            {**_PLAIN, "use_sliding_window": (False,), "mlp_only_layers": ([], None)},
            _export_qwen3,
        ),
        HubFamily(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _qwen2,
            {"use_sliding_window": (False,), "mlp_only_layers": ([], None)},
            None,
        ),
        HubFamily("olmoe", "OlmoeForCausalLM", _olmoe, _PLAIN, None),
        HubFamily("glm4_moe", "Glm4MoeForCausalLM", _glm4, {}, _export_glm4),
    )
}
"""The architectures that our GPT can be, by `model_type`."""


def hub_family(values: Values) -> HubFamily:
    """The architecture of a config.json.

    Raises:
        ConfigError: it is none that our GPT can be.
    """
    name = str(values.get("model_type"))
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type={name!r}: is none that runs as a GPT of expertmesh ({', '.join(FAMILIES)}); run its experts through "
            "expertmesh.integrations.transformers.apply(model), or make experts of a dense one with expertmesh.models.upcycle"
        )
    return FAMILIES[name]


def model_config(values: Values, *, start_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """Our configuration of the model that a config.json describes.

    Args:
        values: of config.json.
        start_ids: what its tokenizer puts before a prompt, see `hub_start`; None: not known.

    Raises:
        ConfigError: an option has a value that our GPT cannot compute, or one is missing.
    """
    family = hub_family(values)
    for name, allowed in family.refused.items():
        if name in values and values[name] not in allowed:
            raise ConfigError(
                f"{name}={values[name]!r}: a {family.model_type} with it does not run as a GPT of expertmesh, only with "
                f"{allowed[0]!r}; run its experts through expertmesh.integrations.transformers.apply(model)"
            )
    rope = _rope(values)
    if not isinstance(rope, Mapping):
        raise ConfigError(
            f"rope_parameters={rope!r}: is no JSON object; restore config.json from the hub"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ConfigError(
            f"rope_type={rope_type!r}: positions are scaled, which a GPT of expertmesh does not do; use a model without"
        )
    activation = str(values.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act={activation!r}: is none of {', '.join(_ACTIVATIONS)}; use another model"
        )
    name = f"config.json of a {family.model_type}"
    try:
        common = {
            "vocab_size": values["vocab_size"],
            "max_seq_len": values["max_position_embeddings"],
            "dim": values["hidden_size"],
            "num_layers": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "num_kv_heads": values.get("num_key_value_heads"),
            "head_dim": values.get("head_dim"),
            "norm_eps": values["rms_norm_eps"],
            "tie_embeddings": values.get("tie_word_embeddings", False),
            "rope_base": _theta(values),
            "init_std": values.get("initializer_range", 0.02),
            "activation": _ACTIVATIONS[activation],
            "end_ids": end_ids(values),
            "start_ids": start_ids,
        }
        return ModelConfig.model_validate(common | family.options(values))
    except KeyError as missing:
        raise ConfigError(f"{name} has no {missing.args[0]}; restore it from the hub") from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} has a value of a wrong type ({error}); restore it from the hub"
        ) from None


def end_ids(values: Values) -> tuple[int, ...]:
    """The tokens that end a text: one id or a list of them; those outside the vocabulary never come.

    Raises:
        ConfigError: an entry is no id.
    """
    given = values.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(i) is not int for i in ids):  # true is an int to Python
        raise ConfigError(
            f"eos_token_id={given!r}: is neither a token id nor a list of them; restore it from the hub"
        )
    return tuple(i for i in ids if 0 <= i < values["vocab_size"])


def export_family(config: ModelConfig) -> HubFamily:
    """The architecture under whose names a model of ours goes out.

    Raises:
        ConfigError: no architecture of the hub computes what an option of ours asks for; names it.
    """
    _refuse_export(config)
    moe = config.moe
    if moe.score_function == "sigmoid" or config.first_dense_layers or config.qkv_bias:
        return FAMILIES["glm4_moe"]
    return FAMILIES["qwen3_moe" if config.qk_norm else "mixtral"]


def hub_config(config: ModelConfig, family: HubFamily, *, dtype: str) -> dict[str, Any]:
    """The config.json of a model of ours.

    Args:
        config: the model.
        family: from `export_family`.
        dtype: of the written weights, as torch names it.
    """
    assert family.export is not None
    turning = {"partial_rotary_factor": config.rope_fraction}
    rope = {"rope_theta": config.rope_base, "rope_type": "default"}
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
        "hidden_act": {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[config.activation],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_base,
        "rope_parameters": rope | (turning if family.model_type == "glm4_moe" else {}),
        "initializer_range": config.init_std,
        "num_experts_per_tok": config.moe.top_k,
        "attention_dropout": 0.0,
        "use_cache": True,
        **family.export(config),
    }


def _refuse_export(config: ModelConfig) -> None:
    moe = config.moe
    sigmoid = moe.score_function == "sigmoid"
    glm = sigmoid and moe.bias_update_rate > 0
    shared = moe.num_shared_experts * moe.hidden_dim
    rules: list[tuple[str, Any, bool]] = [
        ("moe.num_experts", moe.num_experts, len(set(moe.num_experts)) == 1),
        ("activation", config.activation, config.activation in _ACTIVATIONS.values()),
        ("qk_norm_scope", config.qk_norm_scope, config.qk_norm_scope == "head"),
        ("qkv_bias", config.qkv_bias, glm or not config.qkv_bias),
        ("rope_fraction", config.rope_fraction, glm or config.rope_fraction == 1),
        ("first_dense_layers", config.first_dense_layers, glm or not config.first_dense_layers),
        ("moe_every", config.moe_every, config.moe_every == 1 or (config.qk_norm and not glm)),
        ("moe.router", moe.router, moe.router == "topk"),
        ("moe.score_function", moe.score_function, moe.score_function == "softmax" or glm),
        ("moe.bias_update_rate", moe.bias_update_rate, glm or not moe.bias_update_rate),
        ("moe.normalize_weights", moe.normalize_weights, _normalizes(moe) or glm or config.qk_norm),
        ("moe.weight_scale", moe.weight_scale, glm or moe.weight_scale == 1),
        ("moe.num_expert_groups", moe.num_expert_groups, glm or moe.num_expert_groups == 1),
        ("moe.num_shared_experts", moe.num_shared_experts, glm == bool(moe.num_shared_experts)),
        ("moe.shared_hidden_dim", moe.shared_hidden_dim, moe.shared_hidden_dim in (None, shared)),
        ("moe.shared_gate", moe.shared_gate, not moe.shared_gate),
        ("moe.logit_temperature", moe.logit_temperature, moe.logit_temperature == 1),
        ("moe.residual", moe.residual, not moe.residual),
        ("moe.bias", moe.bias, not moe.bias),
        ("moe.eval_capacity_factor", moe.eval_capacity_factor, moe.eval_capacity_factor is None),
        ("moe.max_capacity_factor", moe.max_capacity_factor, moe.max_capacity_factor is None),
    ]
    for name, value, fits in rules:
        if not fits:
            raise ConfigError(
                f"model.{name}",
                value,
                "Mixtral, Qwen3-MoE and GLM-4-MoE have nothing like it together with the model's other options",
                "keep the model in expertmesh, or train one without it",
            )
