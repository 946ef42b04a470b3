"""What a hub model's config.json says, as options of our GPT. What has no counterpart is refused by name, or said where it is for training."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig

ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""Of a gated feed-forward block, the hub's names and ours."""
_BIAS_RATE = 1e-3
"""DeepSeek's step of the balancing bias, which no config.json tells."""
_log = logging.getLogger("expertmesh.integrations")

Values = Mapping[str, Any]


class HubFamily(NamedTuple):
    """One architecture of the hub.

    Attributes:
        model_type: its name in config.json.
        architecture: transformers' class.
        options: of config.json -> what our `ModelConfig` has beyond the common ones, its `moe` among them.
        defaults: what config.json says where it leaves an option out, as transformers has it; sizes of weights have none.
        refused: option of config.json -> the values with which our GPT computes the same.
        uses_window: of config.json -> whether `sliding_window` limits the attention.
    """

    model_type: str
    architecture: str
    options: Callable[[Values], dict[str, Any]]
    defaults: Values
    refused: Mapping[str, tuple[Any, ...]]
    uses_window: Callable[[Values], bool]


def _mixtral(v: Values) -> dict[str, Any]:
    return {"moe": _moe(v, "num_local_experts", "intermediate_size", normalizes=True)}


def _qwen3(v: Values) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "moe_every": v["decoder_sparse_step"],
        "first_dense_layers": _first_dense(v),
        "moe": _moe(v, "num_experts", "moe_intermediate_size", normalizes=v["norm_topk_prob"]),
    }


def _qwen2(v: Values) -> dict[str, Any]:
    moe = _moe(v, "num_experts", "moe_intermediate_size", normalizes=v["norm_topk_prob"])
    shared = {
        "shared_hidden_dim": v["shared_expert_intermediate_size"],
        "num_shared_experts": 1,
        "shared_gate": True,
    }
    return {
        "qkv_bias": v["qkv_bias"],
        "moe_every": v["decoder_sparse_step"],
        "first_dense_layers": _first_dense(v),
        "moe": moe | shared,
    }


def _olmoe(v: Values) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "qk_norm_scope": "projection",
        "moe": _moe(v, "num_experts", "intermediate_size", normalizes=v["norm_topk_prob"]),
    }


def _glm4(v: Values) -> dict[str, Any]:
    moe = _moe(v, "n_routed_experts", "moe_intermediate_size", normalizes=v["norm_topk_prob"])
    return {
        "qk_norm": v["use_qk_norm"],
        "qkv_bias": v["attention_bias"],
        "rope_fraction": _rope(v).get("partial_rotary_factor", v["partial_rotary_factor"]),
        "first_dense_layers": v["first_k_dense_replace"],
        "moe": moe
        | {
            "score_function": "sigmoid",
            "num_expert_groups": v["n_group"],
            "num_limited_groups": v["topk_group"] if v["n_group"] > 1 else 1,
            "weight_scale": v["routed_scaling_factor"],
            "num_shared_experts": v["n_shared_experts"],
            "bias_update_rate": _BIAS_RATE,
        },
    }


def _latent(v: Values, values: Values) -> dict[str, Any]:
    """Multi-head latent attention, and the layers and experts that both DeepSeek families have."""
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = {name: v[name] for name in sizes}
    # null: queries come from the token itself
    latent["q_lora_rank"] = {**v, **values}.get("q_lora_rank")
    latent["interleaved"] = v.get("rope_interleave", True)
    return {
        "latent": latent,
        "num_kv_heads": None,
        "head_dim": None,
        "first_dense_layers": v["first_k_dense_replace"],
    }


def _deepseek2(v: Values) -> dict[str, Any]:
    moe = _moe(v, "n_routed_experts", "moe_intermediate_size", normalizes=False)
    groups = {}
    if v["topk_method"] == "group_limited_greedy" and (v.get("n_group") or 1) > 1:
        groups = {
            "num_expert_groups": v["n_group"],
            "num_limited_groups": v["topk_group"],
            "group_score": "max",
        }
    return {
        "moe": moe
        | groups
        | {
            "weight_scale": v["routed_scaling_factor"],
            "num_shared_experts": v["n_shared_experts"] or 0,
        },
    }


def _deepseek3(v: Values) -> dict[str, Any]:
    moe = _moe(v, "n_routed_experts", "moe_intermediate_size", normalizes=v["norm_topk_prob"])
    return {
        "moe": moe
        | {
            "score_function": "sigmoid",
            "num_expert_groups": v["n_group"],
            "num_limited_groups": v["topk_group"] if v["n_group"] > 1 else 1,
            "weight_scale": v["routed_scaling_factor"],
            "num_shared_experts": v["n_shared_experts"] or 0,
            "bias_update_rate": _BIAS_RATE,
        },
    }


def _gpt_oss(v: Values) -> dict[str, Any]:
    window, every = _windows(v)
    moe = _moe(v, "num_local_experts", "intermediate_size", normalizes=True)
    return {
        "activation": "clamped_swiglu",
        "qkv_bias": v["attention_bias"],
        "out_bias": v["attention_bias"],
        "sinks": True,
        "sliding_window": window,
        "full_attention_every": every,
        "moe": moe
        | {
            "score_function": "softmax_after_topk",
            "bias": True,
            "router_bias": True,
        },
    }


def _windows(v: Values) -> tuple[int | None, int | None]:
    """`sliding_window` and `full_attention_every` of layers of which every n-th sees all, as `layer_types` says.

    Raises:
        ConfigError: no such n makes them.
    """
    layers, window = v["num_hidden_layers"], v["sliding_window"]
    kinds = v.get("layer_types") or layer_types(layers, 2)
    if window is None or list(kinds) == ["full_attention"] * layers:
        return None, None
    for every in (*range(2, layers + 1), None):
        if list(kinds) == layer_types(layers, every):
            return window, every
    raise ConfigError(
        f"layer_types={kinds!r}: a GPT of expertmesh has windows in all layers, or in all but every n-th of {layers}; use another model"
    )


def layer_types(num_layers: int, every: int | None) -> list[str]:
    """Kinds of attention as the hub names them, where every n-th layer sees all."""
    sees_all = [every is not None and i % every == every - 1 for i in range(num_layers)]
    return ["full_attention" if whole else "sliding_attention" for whole in sees_all]


YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""Options of YaRN, the hub's names and ours."""


def _scaling(v: Values, *, latent: bool) -> dict[str, Any]:
    """Options of stretched positions, where a config.json has them."""
    rope = _rope(v)
    if rope.get("rope_type", rope.get("type", "default")) != "yarn":
        return {}
    found = {ours: rope[name] for name, ours in YARN.items() if rope.get(name) is not None}
    if not latent and not (found.get("mscale") and found.get("mscale_all_dim")):
        # one of the two alone does nothing to ordinary attention
        found = {n: value for n, value in found.items() if not n.startswith("mscale")}
    return {"rope_scaling": found}


def _moe(v: Values, experts: str, hidden: str, *, normalizes: bool) -> dict[str, Any]:
    return {
        # transformers 5 writes num_local_experts for all families, the hub's older files their own names
        "num_experts": (v[experts] if experts in v else v["num_local_experts"],),
        "top_k": v["num_experts_per_tok"],
        "hidden_dim": v[hidden],
        "normalize_weights": "topk" if normalizes else "none",
    }


def _first_dense(v: Values) -> int | None:
    """`first_dense_layers` with which the layers that `mlp_only_layers` leaves have experts; None: there is no such number."""
    without, step = v.get("mlp_only_layers") or [], v["decoder_sparse_step"]
    if not without or not isinstance(step, int) or step < 1:
        return 0
    possible = range(step - 1, v["num_hidden_layers"], step)
    sparse = [i for i in possible if i not in without]
    skipped = len(possible) - len(sparse)
    return skipped * step if sparse == list(possible[skipped:]) else None


def _rope(v: Values) -> Values:
    found: Values = v.get("rope_scaling") or v.get("rope_parameters") or {}
    return found


def _always(v: Values) -> bool:
    return True


def _never(v: Values) -> bool:
    return False


def _if_asked(v: Values) -> bool:
    return bool(v.get("use_sliding_window"))


_QWEN = {
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_DEFAULTS: dict[str, Values] = {
    "mixtral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1e6,
    },
    "qwen3_moe": _QWEN | {"num_key_value_heads": 4, "num_experts_per_tok": 8},
    "qwen2_moe": _QWEN | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "qkv_bias": True},
    "olmoe": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
    },
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
    },
    "gpt_oss": {
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
    "glm4_moe": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
    },
}
_ALL_DEFAULTS: Values = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
_PLAIN: Mapping[str, tuple[Any, ...]] = {"attention_bias": (False, None), "clip_qkv": (None,)}
_DEEPSEEK: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1,),
    "ep_size": (1,),
}
_DEEPSEEK2 = _DEEPSEEK | {
    "topk_method": ("greedy", "group_limited_greedy", None),
    "scoring_func": ("softmax", None),
    "norm_topk_prob": (False, None),
}
_DEEPSEEK3 = _DEEPSEEK | {"topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid", None)}
_GPT_OSS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "swiglu_limit": (CLAMP_LIMIT, None),
    "swiglu_alpha": (CLAMP_SLOPE, None),
}
_CAUSAL: Mapping[str, tuple[Any, ...]] = {"is_causal": (True, None)}

_TRAINING_ONLY = {
    "attention_dropout": "dropout on attention weights",
    "router_jitter_noise": "noise on the input of router and experts together (moe.input_jitter is the router's alone)",
    "router_z_loss_coef": "a loss that transformers' own class does not compute (moe.z_loss_weight is ours)",
    "aux_loss_alpha": "a loss that transformers' own class does not compute (moe.aux_loss_weight is ours)",
}
"""Options that change a training alone, which is another then, and what they are."""


def _family(
    model_type: str,
    architecture: str,
    options: Callable[[Values], dict[str, Any]],
    refused: Mapping[str, tuple[Any, ...]],
    uses_window: Callable[[Values], bool] = _never,
) -> HubFamily:
    defaults = {**_ALL_DEFAULTS, **_DEFAULTS[model_type]}
    refused = {**_CAUSAL, **refused}
    return HubFamily(model_type, architecture, options, defaults, refused, uses_window)


ALIASES = {"kimi_k2": "deepseek_v3"}
"""Names that the same architecture has in other models."""
LATENT = ("deepseek_v2", "deepseek_v3")
"""Families with multi-head latent attention."""
FAMILIES = {
    family.model_type: family
    for family in (
        _family("mixtral", "MixtralForCausalLM", _mixtral, {}, _always),
        _family("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3, _PLAIN, _if_asked),
        _family("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2, {}, _if_asked),
        _family("olmoe", "OlmoeForCausalLM", _olmoe, _PLAIN),
        _family("glm4_moe", "Glm4MoeForCausalLM", _glm4, {}),
        _family("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS),
        _family("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek2, _DEEPSEEK2),
        _family("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek3, _DEEPSEEK3),
    )
}
"""The architectures that our GPT can be, by `model_type`."""


def hub_family(values: Values) -> HubFamily:
    """The architecture of a config.json.

    Raises:
        ConfigError: it is none that our GPT can be.
    """
    name = str(values.get("model_type"))
    name = ALIASES.get(name, name)
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type={name!r}: is none that runs as a GPT of expertmesh ({', '.join(FAMILIES)}); run its experts through "
            "expertmesh.integrations.transformers.apply(model), or make experts of a dense one with expertmesh.models.upcycle"
        )
    return FAMILIES[name]


def model_config(values: Values, *, start_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """Our configuration of the model that a config.json describes.

    An option that is missing or null has the value that transformers gives it. `router_aux_loss_coef` c becomes the weight
    c K / L of each of the L layers with experts: transformers' loss is K at balance, and one of the mean over the layers.

    Args:
        values: of config.json.
        start_ids: what its tokenizer puts before a prompt, see `hub_start`; None: not known.

    Raises:
        ConfigError: an option has a value that our GPT cannot compute, or one is missing.
    """
    family = hub_family(values)
    _refuse(values, family)
    given = {name: value for name, value in values.items() if value is not None}
    v = {**family.defaults, **given}
    name = f"config.json of a {family.model_type}"
    if str(v["hidden_act"]) not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act={v['hidden_act']!r}: is none of {', '.join(ACTIVATIONS)}; use another model"
        )
    try:
        common = {
            "vocab_size": v["vocab_size"],
            "max_seq_len": v["max_position_embeddings"],
            "dim": v["hidden_size"],
            "num_layers": v["num_hidden_layers"],
            "num_heads": v["num_attention_heads"],
            # null: as many as there are heads
            "num_kv_heads": {**v, **values}.get("num_key_value_heads"),
            "head_dim": v.get("head_dim"),
            "ffn_hidden_dim": v["intermediate_size"],
            "norm_eps": v["rms_norm_eps"],
            "tie_embeddings": v["tie_word_embeddings"],
            "rope_base": _rope(v).get("rope_theta", v["rope_theta"]),
            "init_std": v["initializer_range"],
            "activation": ACTIVATIONS[v["hidden_act"]],
            "end_ids": end_ids(values),
            "start_ids": start_ids,
        }
        is_latent = family.model_type in LATENT
        options = common | (_latent(v, values) if is_latent else {}) | family.options(v)
        options |= _scaling(v, latent=is_latent)
    except KeyError as missing:
        raise ConfigError(f"{name} has no {missing.args[0]}; restore it from the hub") from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} has a value of a wrong type ({error}); restore it from the hub"
        ) from None
    if options.get("first_dense_layers", 0) is None:
        wanted = "dense layers that are the first ones"
        raise _other_model(f"mlp_only_layers={v['mlp_only_layers']!r}", family, wanted)
    try:
        config = ModelConfig.model_validate(options)
    except ConfigError as error:
        raise ConfigError(f"{name}, in the words of expertmesh: {error}") from None
    has_loss = "router_aux_loss_coef" in family.defaults
    return _with_loss(config, v["router_aux_loss_coef"] if has_loss else 0.0)


def _with_loss(config: ModelConfig, coef: Any) -> ModelConfig:
    """The configuration with the weight of the balance loss that stands for transformers' coefficient."""
    is_number = isinstance(coef, int | float) and not isinstance(coef, bool)
    if not is_number or not math.isfinite(coef) or coef < 0:
        raise ConfigError(
            f"router_aux_loss_coef={coef!r}: must be a finite number of at least 0; restore it from the hub"
        )
    weight = coef * config.moe.top_k / max(config.num_moe_layers, 1)
    moe = config.moe.model_copy(update={"aux_loss_weight": weight})
    return config.model_copy(update={"moe": moe})


def _refuse(values: Values, family: HubFamily) -> None:
    """Refuse what our GPT would compute otherwise.

    Raises:
        ConfigError: an option asks for that; names it.
    """
    refused = {name: allowed for name, allowed in family.refused.items() if name in values}
    for name, allowed in refused.items():
        if values[name] not in allowed:
            raise _other_model(f"{name}={values[name]!r}", family, f"{name}={allowed[0]!r}")
    v = {**family.defaults, **values}
    longest, window = v["max_position_embeddings"], v.get("sliding_window")
    is_short = not (isinstance(window, int) and isinstance(longest, int) and window >= longest)
    if window is not None and is_short and family.uses_window(v):
        raise _other_model(
            f"sliding_window={window!r}", family, "one of at least max_position_embeddings or none"
        )
    kinds = values.get("layer_types") or []
    if family.model_type == "qwen2_moe" and any(kind != "full_attention" for kind in kinds):
        raise _other_model(f"layer_types={kinds!r}", family, "full_attention in every layer")
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name) or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(
                f"{name}={rope!r}: is no JSON object; restore config.json from the hub"
            )
        if nested := [kind for kind, value in rope.items() if isinstance(value, Mapping)]:
            raise _other_model(f"{name}.{nested[0]}", family, "the same positions in every layer")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "yarn"):
            raise ConfigError(
                f"rope_type={rope_type!r}: positions are scaled in a way that a GPT of expertmesh does not know; use a model "
                "with default or yarn"
            )
        factor = rope.get("factor")
        if rope_type == "yarn" and not (isinstance(factor, int | float) and factor >= 1):
            raise ConfigError(
                f"{name}.factor={factor!r}: must be a number of at least 1 with rope_type=yarn; restore config.json from the hub"
            )


def _other_model(what: str, family: HubFamily, wanted: str) -> ConfigError:
    return ConfigError(
        f"{what}: a {family.model_type} with it does not run as a GPT of expertmesh, only with {wanted}; run its experts "
        "through expertmesh.integrations.transformers.apply(model)"
    )


def left_out(values: Values) -> tuple[str, ...]:
    """What of a config.json our GPT does not do, in words; it counts in training only.

    Args:
        values: of a config.json that `model_config` takes.
    """
    family = hub_family(values)
    found = [
        f"{name}={values[name]}: {what}"
        for name, what in _TRAINING_ONLY.items()
        if values.get(name)
    ]
    if "router_aux_loss_coef" not in family.defaults and values.get("router_aux_loss_coef"):
        coef = values["router_aux_loss_coef"]
        found.append(f"router_aux_loss_coef={coef}: which a {family.model_type} does not read")
    return tuple(found)


def say_left_out(values: Values) -> None:
    """Say what `left_out` found, in one line each."""
    for line in left_out(values):
        _log.warning("config.json: %s; it counts in training only, and is left out", line)


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
