"""Translation of a hub model's config.json to options of our GPT; options that it lacks are refused, or logged if for
training only."""

import logging
from collections.abc import Mapping
from typing import Any

from expertmesh.checkpoints.hub import parts
from expertmesh.checkpoints.hub.family import ACTIVATIONS, HubFamily, Values, other_model
from expertmesh.checkpoints.hub.find_family import hub_family
from expertmesh.config.values import Number
from expertmesh.costs.hub_sizes import check_hub_sizes
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig

_log = logging.getLogger("expertmesh.integrations")

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
"""Our names of YaRN's options, by the hub's."""
_TRAINING_ONLY = {
    "attention_dropout": "dropout on attention weights",
    "router_jitter_noise": "noise on the input of router and experts together (moe.input_jitter is the router's alone)",
    "router_z_loss_coef": "a loss that transformers' own class does not compute (moe.z_loss_weight is ours)",
    "aux_loss_alpha": "a loss that transformers' own class does not compute (moe.aux_loss_weight is ours)",
}
"""Options that change training only and are ignored, with their descriptions."""


def _scaling(v: Values, *, latent: bool) -> dict[str, Any]:
    """`rope_scaling` of our config, if a config.json asks for YaRN; else empty."""
    rope = parts.rope(v)
    if rope.get("rope_type", rope.get("type", "default")) != "yarn":
        return {}
    rope = {"original_max_position_embeddings": v["max_position_embeddings"], **rope}
    found = {ours: rope[name] for name, ours in YARN.items() if rope.get(name) is not None}
    if not latent and not (found.get("mscale") and found.get("mscale_all_dim")):
        # ordinary attention needs both
        found = {n: value for n, value in found.items() if not n.startswith("mscale")}
    return {"rope_scaling": found}


def model_config(values: Values, *, start_ids: tuple[int, ...] | None = None) -> ModelConfig:
    """Our configuration of the model that a config.json describes.

    An option that is missing or null gets transformers' default. `router_aux_loss_coef` c becomes the weight
    c K / L of each of the L layers with experts: transformers' loss is K at balance, and one of the mean over the
    layers.
    """
    family = hub_family(values)
    _refuse(values, family)
    v = family.filled(values)
    check_hub_sizes(v)
    name = f"config.json of a {family.model_type}"
    if str(v["hidden_act"]) not in ACTIVATIONS:
        raise ConfigError(f"hidden_act={v['hidden_act']!r}: is none of {', '.join(ACTIVATIONS)}; use another model")
    try:
        options = {
            "vocab_size": v["vocab_size"],
            "max_seq_len": v["max_position_embeddings"],
            "dim": v["hidden_size"],
            "num_layers": v["num_hidden_layers"],
            "num_heads": v["num_attention_heads"],
            # null means as many as query heads
            "num_kv_heads": v.get("num_key_value_heads"),
            "head_dim": v.get("head_dim"),
            "ffn_hidden_dim": v["intermediate_size"],
            "norm_eps": v["rms_norm_eps"],
            "tie_embeddings": v["tie_word_embeddings"],
            "rope_base": parts.rope(v).get("rope_theta", v["rope_theta"]),
            "init_std": v["initializer_range"],
            "activation": ACTIVATIONS[v["hidden_act"]],
            "end_ids": end_ids(values),
            "start_ids": start_ids,
        }
        options |= family.read(v)
        options |= _scaling(v, latent="latent" in options)
    except KeyError as missing:
        raise ConfigError(f"{name} has no {missing.args[0]}; restore it from the hub") from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{name} has a value of a wrong type ({error}); restore it from the hub") from None
    try:
        config = ModelConfig.model_validate(options)
    except ConfigError as error:
        raise ConfigError(f"{name}, in the words of expertmesh: {error}") from None
    has_loss = "router_aux_loss_coef" in family.defaults
    return _with_loss(config, v["router_aux_loss_coef"] if has_loss else 0.0)


def _with_loss(config: ModelConfig, coef: Any) -> ModelConfig:
    """The configuration with the weight of the balance loss for transformers' `router_aux_loss_coef`."""
    Number(0, fix="restore it from the hub").check("router_aux_loss_coef", coef)
    weight = coef * config.moe.top_k / max(config.num_moe_layers, 1)
    moe = config.moe.model_copy(update={"aux_loss_weight": weight})
    return config.model_copy(update={"moe": moe})


def _refuse(values: Values, family: HubFamily) -> None:
    """Refuse options that our GPT would compute differently."""
    refused = {name: allowed for name, allowed in family.refused.items() if name in values}
    for name, allowed in refused.items():
        if values[name] not in allowed:
            raise other_model(f"{name}={values[name]!r}", family.model_type, f"{name}={allowed[0]!r}")
    for name in ("rope_scaling", "rope_parameters"):
        rope = values.get(name) or {}
        if not isinstance(rope, Mapping):
            raise ConfigError(f"{name}={rope!r}: is no JSON object; restore config.json from the hub")
        if nested := [kind for kind, value in rope.items() if isinstance(value, Mapping)]:
            raise other_model(f"{name}.{nested[0]}", family.model_type, "the same positions in every layer")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "yarn"):
            raise ConfigError(
                f"rope_type={rope_type!r}: positions are scaled in a way that a GPT of expertmesh does not know; use a "
                "model with default or yarn"
            )
        factor = rope.get("factor")
        if rope_type == "yarn":
            Number(1, fix="restore config.json from the hub").check(f"{name}.factor", factor)


def left_out(values: Values) -> tuple[str, ...]:
    """Descriptions of the options in a config.json that our GPT ignores, all for training only."""
    family = hub_family(values)
    found = [f"{name}={values[name]}: {what}" for name, what in _TRAINING_ONLY.items() if values.get(name)]
    if "router_aux_loss_coef" not in family.defaults and values.get("router_aux_loss_coef"):
        coef = values["router_aux_loss_coef"]
        found.append(f"router_aux_loss_coef={coef}: which a {family.model_type} does not read")
    return tuple(found)


def say_left_out(values: Values) -> None:
    """Log each description of `left_out` in one line."""
    for line in left_out(values):
        _log.warning("config.json: %s; it counts in training only, and is left out", line)


def end_ids(values: Values) -> tuple[int, ...]:
    """Ids of the tokens that end a text (`eos_token_id`, an id or a list); ids outside the vocabulary are dropped."""
    given = values.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(i) is not int for i in ids):  # true is an int to Python
        raise ConfigError(f"eos_token_id={given!r}: is neither a token id nor a list of them; restore it from the hub")
    return tuple(i for i in ids if 0 <= i < values["vocab_size"])
