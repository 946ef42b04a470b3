"""Export of a GPT to a hub architecture: choice of the architecture, and its config.json."""

import logging
from pathlib import Path
from typing import Any

from expertmesh.checkpoints.hub.configs import YARN
from expertmesh.checkpoints.hub.family import ACTIVATIONS, HubFamily, option
from expertmesh.checkpoints.hub.find_family import FAMILIES, hub_family
from expertmesh.checkpoints.hub.parts import training_only
from expertmesh.config.base import parse_json
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.text.tokenizer import EXTRAS

_log = logging.getLogger("expertmesh.integrations")


def origin_of(run_dir: Path) -> HubFamily | None:
    """Hub architecture that the model of a run was converted from; None: not from the hub, or an unknown
    architecture."""
    path = run_dir / EXTRAS / "config.json"
    try:
        return hub_family(parse_json(path.read_bytes())) if path.is_file() else None
    except ConfigError:
        return None


def export_family(config: ModelConfig, origin: HubFamily | None = None) -> HubFamily:
    """Hub architecture for the export of a model."""
    if origin is not None and not origin.misfits(config):
        return origin
    misfits = {family.model_type: family.misfits(config) for family in FAMILIES.values()}
    nearest = FAMILIES[min(misfits, key=lambda name: len(misfits[name]))]
    found = misfits[nearest.model_type]
    if not found:
        return nearest
    raise ConfigError(
        f"model.{found[0]}",
        option(config, found[0]),
        f"{nearest.title}, the nearest on the hub, has nothing like it together with the model's other options",
        f"{nearest.ways.get(found[0], '')}keep the model in expertmesh, or train one without it",
    )


def hub_config(config: ModelConfig, family: HubFamily, *, dtype: str) -> dict[str, Any]:
    """Values of config.json for an exported model."""
    rope: dict[str, Any] = {"rope_theta": config.rope_base, "rope_type": "default"}
    if config.rope_scaling.factor > 1:
        scaling = config.rope_scaling
        rope |= {name: getattr(scaling, ours) for name, ours in YARN.items()} | {"rope_type": "yarn"}
        rope = {name: value for name, value in rope.items() if value not in (None, 0.0)}
        rope["truncate"] = scaling.truncate
    values = {
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
        "rope_parameters": rope,
        "initializer_range": config.init_std,
        "num_experts_per_tok": config.moe.top_k,
        "attention_dropout": 0.0,
        "use_cache": True,
        **family.write(config),
    }
    turning = "partial_rotary_factor"
    rope |= {turning: values[turning]} if turning in values else {}
    return values


def left_out(config: ModelConfig, family: HubFamily) -> list[str]:
    """Training-only options that the family's config.json cannot express, as `name=value`."""
    has_loss = "router_aux_loss_coef" in family.defaults
    return [f"moe.{one}" for one in training_only(config.moe, has_balance_loss=has_loss)]


def say_left_out(config: ModelConfig, family: HubFamily) -> None:
    """Log the options of `left_out` in one line."""
    if found := left_out(config, family):
        _log.warning(
            "%s has no place for model.%s: counts in training only, and is left out",
            family.architecture,
            ", model.".join(found),
        )
