"""The model to plan: a recipe, a run, a config.json of the hub, or a model of planner/published.toml."""

import difflib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.config.base import expanded, is_there, parse_json, saved_run
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.run import RunConfig
from expertmesh.config.values import shown, some_of
from expertmesh.costs.sizes import ModelSizes, sizes_of_hub
from expertmesh.costs.weight_formats import Weights, weights_of_files
from expertmesh.errors import CheckpointError, ConfigError, named, text_of
from expertmesh.models.bound_files import check_run, newest_state
from expertmesh.models.family import Family
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.run_sizes import sizes_of_run
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.registry import FAMILIES, recipe, recipe_owners
from expertmesh.planner.arguments import path_text
from expertmesh.planner.published import published_files, published_models
from expertmesh.planner.unmodelled import refuse_unmodelled
from expertmesh.planner.unread import unread

TOKENS_PER_PARAMETER = 20
"""Default training tokens per active parameter (Hoffmann et al. 2022)."""
BATCH_TOKENS = 2**22
"""Default tokens of a step."""
_SEQ_LEN = 4096
_OF_RUN = ("recipe", "family", "model")
"""Names in the config.json of a run, and in none of the hub."""


@dataclass(frozen=True)
class PlannedModel:
    """A model with the sequences and tokens of its training."""

    name: str  # name for display, and in the printed command
    sizes: ModelSizes
    seq_len: int  # tokens of a sequence, S
    batch_tokens: int  # tokens of one step
    train_tokens: float  # tokens of the whole training
    config: RunConfig | None = None  # configuration of a run of this project; None: the model cannot be trained here
    guesses: tuple[str, ...] = ()  # guessed inputs of its training, in words
    words: str = ""  # words after `expertmesh train` that give this configuration; "": it is of no recipe and no file
    files: Weights | None = None  # formats of the weights in its files; None: not said
    folder: str = ""  # folder of its weights; "": unknown
    has_lengths: bool = False  # whether the lengths of its sequences are the model's, as sources and targets are
    unread: tuple[str, ...] = ()  # what its config.json says and no plan counts, and what its sizes leave out, in words


def planned_model(target: str | Path | GPTRunConfig) -> PlannedModel:
    """The model of a name, path or configuration.

    Args:
        target: a recipe's name, a run's folder, a config.json of the hub or its folder, a name of
            planner/published.toml, or a configuration.
    """
    if isinstance(target, GPTRunConfig):
        return of_config("configuration", target)
    name = path_text("model", target, "a recipe's or model's name, a path or a GPTRunConfig")
    if name in recipe_owners():
        config = recipe(name)
        return _of_recipe(name, config, recipe_owners()[name])
    path = expanded(name)
    is_folder = bool(name) and is_there(path) and path.is_dir()
    file = path / "config.json" if is_folder else path
    if is_there(file) and file.is_file():
        return _of_file(name, file)
    if name in published_models():
        return replace(_of_sizes(name, published_models()[name]), files=published_files(name))
    if is_folder:
        raise ConfigError(f"plan {name}: has no config.json; give a run, or a Hugging Face folder")
    known = [*RECIPES, *published_models()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {some_of(known)}"
    raise ConfigError(f"plan {shown(name)}: no recipe, run or config.json; {hint}{how_to_fetch(name)}")


def changed_recipe(name: str, changes: Mapping[str, Any]) -> GPTRunConfig:
    """A recipe with other values."""
    config = recipe(name, changes)
    if not isinstance(config, GPTRunConfig):
        raise ConfigError(f"plan {name}: no option of an encoder-decoder can be set here; leave {named('set')} out")
    return config


def _of_recipe(name: str, config: RunConfig, family: Family) -> PlannedModel:
    """The model of a recipe, by the sizes that its family knows."""
    if isinstance(config, GPTRunConfig):
        return of_config(name, config, words=name)
    found = family.sizes_of(config)
    if found is None:
        known = f"plan one of {', '.join(RECIPES)}"
        raise ConfigError(f"plan {name}: is no language model, and its family has no sizes; {known}")
    sizes, seq_len = found
    batch = config.train.batch_size * seq_len
    tokens = float(config.train.steps * batch)
    guess = f"sources and targets of {seq_len} tokens together, all as long as the model takes them"
    return PlannedModel(name, sizes, seq_len, batch, tokens, config, guesses=(guess,), words=name, has_lengths=True)


def of_config(name: str, config: GPTRunConfig, *, words: str = "") -> PlannedModel:
    """The model of a configuration, with what of it rests."""
    seq_len = config.data.seq_len
    batch = config.train.batch_size * seq_len
    return PlannedModel(
        name,
        sizes_of_run(config),
        seq_len,
        batch,
        float(config.train.steps * batch),
        config,
        words=words,
    )


def _of_sizes(name: str, sizes: ModelSizes) -> PlannedModel:
    return PlannedModel(
        name,
        sizes,
        _SEQ_LEN,
        BATCH_TOKENS,
        TOKENS_PER_PARAMETER * sizes.active_parameters,
        guesses=(
            f"sequences of {_SEQ_LEN} tokens",
            f"{BATCH_TOKENS:,} tokens per step",
            f"{TOKENS_PER_PARAMETER} training tokens per active parameter",
        ),
    )


def _of_file(name: str, file: Path) -> PlannedModel:
    try:
        values: Any = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan {name}: {file} is no JSON ({error}); restore it") from None
    if not isinstance(values, dict):
        raise ConfigError(f"plan {name}: {file} holds {shown(json.dumps(values))}, not options; restore it")
    said = unread(values)
    is_hub = "model_type" in values or values.keys().isdisjoint(_OF_RUN)
    found = _of_hub(name, file, values) if is_hub else _of_run(name, file, values)
    files = weights_of_files(values.get("quantization_config"))
    return replace(found, files=files, unread=(*said, *found.unread))


def _of_run(name: str, file: Path, values: dict[str, Any]) -> PlannedModel:
    """The model of a run's config.json, with what `runs.run_dir` and `quantize` write beside the configuration."""
    recipe = values.pop("recipe", None)
    family = values.get("family", GPT.name)
    known = FAMILIES.get(family)
    if known is None or not issubclass(known.config, GPTRunConfig):
        raise ConfigError(f"plan {name}: is of family {shown(family)}; plan a run of family {GPT.name}")
    if values.pop("quantization_config", None) is not None:
        values.pop("dtype", None)
    state, where = newest_state(file.parent)
    try:
        check_run(file.parent, values, state, GPT, where=where)
    except CheckpointError as error:
        raise ConfigError(f"plan {name}: {text_of(error)}") from None
    with saved_run():
        config = known.config.model_validate(values)
    # the file has every option, so that any recipe will do; and its own folder holds a run already
    word = next((known for known in RECIPES if known == recipe), next(iter(RECIPES)))
    folder = shlex.quote(f"{config.train.run_dir}-planned")
    words = f"{word} --config {shlex.quote(str(file))} --train.run-dir {folder}"
    return replace(of_config(name, config, words=words), folder=str(file.parent))


def _of_hub(name: str, file: Path, values: dict[str, Any]) -> PlannedModel:
    """The model of our configuration if our GPT can run it, else of the sizes in config.json alone.

    Training goes on from the weights beside a config.json that our GPT can run.
    """
    refuse_unmodelled(name, values)
    try:
        found = _of_sizes(name, sizes_of(model_config(values)))
        folder = str(file.parent)
        return replace(found, words=f"{shlex.quote(folder)} --data.path DATA", folder=folder)
    except ConfigError as error:
        found = _of_sizes(name, sizes_of_hub(values))
        reason = str(error).partition("; ")[0]
        guess = (
            f"parameters by the sizes in config.json alone, without biases and norms of heads and latents ({reason})"
        )
        return replace(found, unread=(guess,))
