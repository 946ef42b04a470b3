"""Runs that start from other weights (`train.init_from`), and models written as runs of no steps."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from expertmesh.checkpoints.dcp import Make
from expertmesh.checkpoints.merged_adapters import is_factor
from expertmesh.checkpoints.source import read_into
from expertmesh.checkpoints.store import CheckpointStore, list_checkpoints
from expertmesh.config.base import expanded
from expertmesh.config.output_file import naming, new_folder
from expertmesh.config.run import RunConfig
from expertmesh.config.tokens import TokensConfig
from expertmesh.config.values import type_of
from expertmesh.errors import ConfigError
from expertmesh.models.bound_files import RECORD, hashes_in
from expertmesh.models.decoder import LanguageModel
from expertmesh.models.family import Family
from expertmesh.models.registry import FAMILIES, find_family
from expertmesh.models.task import Data, Task
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.layer import MoELayer, grouped_layers
from expertmesh.moe.module_adapters import refuse_adapters
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.base_record import base_record
from expertmesh.runs.run_dir import TOKENIZER, Run, RunDir, find_model
from expertmesh.runs.started_adapters import StartedFactors
from expertmesh.text.format import hub_files
from expertmesh.text.new_tokens import grown_vocabulary
from expertmesh.text.tokenizer import EXTRAS
from expertmesh.text.tokenizer_files import files_in
from expertmesh.training.place_base import packed_storage
from expertmesh.training.state import RunProgress, TrainState

_MODEL = "model."


def with_init_from(config: RunConfig, family: Family) -> RunConfig:
    """Configuration with the options that the weights of `train.init_from` determine, if it is set.

    A resumed run has these options saved; the other run need not exist any more.
    """
    begin = config.train.init_from
    if begin is None:
        return config
    named = None if family.name in FAMILIES else family
    if config.adapter.rests:
        config = config.updated(packed_storage(config.base, find_model(begin, named)))
    own = RunDir(config.train.run_dir)
    if config.train.resume == "never" or not _can_go_on(own, family):
        run = find_model(begin, named)
        if not config.adapter.rests:
            run.check_trains()
        run.check_whole()
        if run.is_quantized and (tokens := _tokens(config)):
            rule, fix = f"needs rows of {begin}, which is quantised", "begin with the model that it was made of"
            raise ConfigError("tokens.add", " ".join(tokens.add), rule, fix)
        found = family.begun_with(config, run.config, where=begin)
        if found.adapter.init_from is not None:
            StartedFactors(found, run)  # refuses what does not fit before work starts
        return found
    saved, _ = own.read_config(named)
    changes: dict[str, str | None] = {"train.init_from": str(own.path)}
    given = getattr(config.data, "encode_with", None)
    own_files = [(expanded(run) / TOKENIZER).resolve() for run in (begin, own.path)]
    if given is not None and expanded(given).resolve() in own_files:
        changes["data.encode_with"] = None
    found = family.begun_with(config.updated(changes), saved, where=str(own.path))
    return found.updated({"train.init_from": begin})


def run_of_init_from(config: RunConfig, family: Family, run_dir: RunDir, ranks: Ranks) -> Run | None:
    """Run or hub model of `train.init_from`, checked to be complete before work that takes long; None: not set, or
    resumed.

    Args:
        ranks: ranks that share the reading; every one must call.
    """
    begin = config.train.init_from
    if begin is None:
        return None
    goes_on = ranks.on_rank0(lambda: list_checkpoints(run_dir.checkpoints))
    if goes_on and not config.adapter.rests:  # checkpoints of adapters lack what rests
        return None
    own = None if family.name in FAMILIES else family
    found = ranks.on_all(lambda: find_model(begin, own)).with_weights(ranks)
    if (tokens := _tokens(config)) is None:
        return found
    assert found.vocab_size is not None
    return found.growing(grown_vocabulary(found.path / TOKENIZER, tokens, vocab_size=found.vocab_size))


def _tokens(config: RunConfig) -> TokensConfig | None:
    """Tokens that a run adds to the vocabulary; None: it adds none."""
    found = getattr(config, "tokens", None)
    return found if isinstance(found, TokensConfig) and found.add else None


def load_base(begin: Run, task: Task, state: TrainState, data: Data) -> None:
    """Load the weights that a run begins with, or on which its adapters are."""
    inherited = task.builder.inherited(state.model, begin.config, data)
    targets = {name: tensor for name, tensor in inherited.items() if not is_factor(name)}
    state.ranks.on_all(lambda: begin.load_into(targets))
    if task.config.adapter.rests:
        state.base = state.ranks.on_rank0(lambda: base_record(begin))


def load_start(begin: Run, task: Task, state: TrainState, data: Data) -> None:
    """Load the adapters that a run begins with, if it names some, each rank its part."""
    config: RunConfig = task.config
    if config.adapter.init_from is None:
        return
    inherited = task.builder.inherited(state.model, begin.config, data)

    def read() -> None:
        started = StartedFactors(config, begin)
        read_into(started, {name: one for name, one in inherited.items() if is_factor(name) or name in started.tensors})

    state.ranks.on_all(read)


def kept_files(config: RunConfig, data: Data) -> dict[str, Path]:
    """Files that a run keeps, by their names in its folder: of its data, and of a hub model that it starts from."""
    begin = config.train.init_from
    # the data have the files beside the tokenizer of a run that came from the hub
    found = {**data.files, **({} if begin is None else hub_files(expanded(begin)))}
    if _tokens(config):
        found = {name: data.files[TOKENIZER] if path.name == TOKENIZER else path for name, path in found.items()}
    return found


def _can_go_on(own: RunDir, family: Family) -> bool:
    is_whole = own.config.exists() and all((own.path / name).is_file() for name in family.files)
    return is_whole and bool(list_checkpoints(own.checkpoints))


def check_saved(model: Any, tokenizer: Tokenizer, config: RunConfig) -> None:
    """Check that a language model can be saved as a run like another run."""
    wanted: Any = getattr(config, "model", None)
    if not isinstance(model, LanguageModel) or type(model.config) is not type(wanted):
        raise ConfigError(
            f"model is {type_of(model)}, and the run that it is saved like has {type_of(wanted)}; give that of load()"
        )
    if not isinstance(tokenizer, Tokenizer) or tokenizer.get_vocab_size() > model.vocab_size:
        raise ConfigError(
            f"tokenizer: is {type_of(tokenizer)}, or has more tokens than the model's {model.vocab_size}; give the "
            "model's, and add tokens to both with add_tokens"
        )
    for layer in model.modules():
        if isinstance(layer, MoELayer) and not isinstance(layer.dispatcher, LocalDispatcher):
            raise ConfigError("model is spread over ranks; save it on one process, loaded whole")
    refuse_adapters(model)
    for _, _, experts in grouped_layers(model):
        if experts.format != "dense":
            raise ConfigError(f"model has {experts.format} experts; give the one that was quantised")


def files_beside(folder: Path, tokenizer: Path) -> dict[str, Path]:
    """Files beside a tokenizer that a run with a changed tokenizer keeps, by their names there."""
    extras = folder / EXTRAS
    kept = {f"{EXTRAS}/{name}": path for name, path in files_in(extras).items()}
    kept |= hub_files(folder)
    return {name: tokenizer if path.name == TOKENIZER else path for name, path in kept.items()}


def save_as_run(
    model: nn.Module,  # the model that the configuration describes, whole
    config: RunConfig,
    *,
    recipe: str,  # name kept with the run
    files: Mapping[str, Path],  # files of the run by their names there, for example "tokenizer.json"
    make: Make | None = None,
) -> Path:
    """Write a model as the run directory `config.train.run_dir`.

    Args:
        make: for a model on the meta device, returns each tensor by its name in the state dict while it is written, so
            memory holds one at a time.
    """
    run_dir = RunDir(config.train.run_dir)
    new_folder("folder", run_dir.path)
    run_dir.path.mkdir(parents=True)
    try:
        with naming(run_dir.path):
            _write(run_dir, model, config, recipe=recipe, files=files, make=make)
    except BaseException:  # an incomplete run is removed
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise
    return run_dir.path


def _write(
    run_dir: RunDir,
    model: nn.Module,
    config: RunConfig,
    *,
    recipe: str,
    files: Mapping[str, Path],
    make: Make | None,
) -> None:
    run_dir.write_description(config, recipe=recipe, files=files)
    store = CheckpointStore(run_dir.checkpoints, keep_last=1)
    try:
        store.save(
            0,
            {f"{_MODEL}{name}": tensor for name, tensor in model.state_dict().items()},
            {
                "progress": asdict(RunProgress()),
                "scaler": {},
                "config": config.model_dump(mode="json"),
                "recipe": recipe,
                "data_key": "",
                RECORD: hashes_in(run_dir.path, find_family(config.family)),
            },
            eval_loss=None,
            make=None if make is None else lambda name: make(name.removeprefix(_MODEL)),
        )
        store.wait()
    finally:
        store.close()
