"""Contents of a checkpoint: model, optimizer, loss scaler, random state, and progress of the run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.source import read_into
from expertmesh.checkpoints.store import read_state
from expertmesh.config.base import dotted_values, expanded, saved_run
from expertmesh.config.run import RunConfig
from expertmesh.errors import CheckpointError, ConfigError, named
from expertmesh.models.bound_files import RECORD
from expertmesh.models.family import Family
from expertmesh.models.registry import DEFAULT
from expertmesh.models.task import Data
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.base_record import BASE, check_same_base
from expertmesh.training.moments_saved import MomentsReader
from expertmesh.training.torchao_adamw import plain_tensors

_RUNS = ("distill.teacher", "train.init_from", "train.branch_from")
"""Options that name the folder of another run."""

_VALUES: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "progress": dict,
    "config": dict,
    "data_key": str,
    "scaler": dict,
}


@dataclass
class RunProgress:
    """Progress of a run."""

    step: int = 0  # number of optimizer steps done, including skipped ones
    samples: int = 0  # number of samples used; the position in the data
    items: int = 0  # number of tokens, images or the family's unit used
    skipped_steps: int = 0  # steps without an update because a value was not finite
    bad_steps_in_row: int = 0  # number of last steps in a row that were skipped
    seconds: float = 0.0  # wall time of all steps, without evaluation

    @classmethod
    def saved(cls, values: Mapping[str, Any], *, where: Path) -> "RunProgress":
        """Progress from the values of a checkpoint. `where`: path of their file, for errors."""
        values = {"items": values.get("tokens", 0), **values}  # former name of "items"
        for name, value in values.items():
            if not isinstance(value, int | float):
                raise CheckpointError(f"{where}: progress.{name} is no number; choose another checkpoint")
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass
class TrainState:
    """State that training changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer  # AdamW or Muon over its parameters
    scaler: torch.amp.GradScaler  # loss scaler; may be disabled
    progress: RunProgress
    ranks: Ranks = field(default_factory=Ranks)  # ranks over which model and optimizer are sharded
    loaded: str = ""  # message about the loaded state; empty: no message
    # record of the weights that rest and are in no checkpoint, see `base_record`; None: all are saved
    base: Mapping[str, str] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint by name: the model's, `optimizer.NAME.exp_avg` ..., random states.

        Sharded parameters and their moments are DTensors.
        """
        found = self._of_model()
        for name, parameter in self._parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                for part, tensor in plain_tensors(key, value).items():
                    found[f"optimizer.{name}.{part}"] = tensor
        return found | _random_states()

    def values(self, config: RunConfig, *, recipe: str, data_key: str, files: Mapping[str, str]) -> dict[str, Any]:
        """All plain values of a checkpoint; `files` are from `hashes_of`."""
        base = {} if self.base is None else {BASE: dict(self.base)}
        return base | {
            "progress": asdict(self.progress),
            "scaler": self.scaler.state_dict(),
            "config": config.model_dump(mode="json"),
            "recipe": recipe,
            "data_key": data_key,
            RECORD: dict(files),
        }

    def load(self, path: Path) -> None:
        """Load a checkpoint that `find_damage` found whole; every rank must call."""
        targets = self._of_model()
        known = set().union(*self.ranks.gather(list(targets)))  # modules may be on other ranks
        values = read_run_state(path)
        if self.base is not None:
            check_same_base(read_state(path).get(BASE), self.base, where=path)
        progress = RunProgress.saved(values["progress"], where=path / "state.json")
        source = Checkpoint(path)
        saved = source.tensors
        expected = {name for name in saved if name.startswith("model.")}
        if extra := sorted(expected - known):
            raise CheckpointError(f"{path}: has a tensor {extra[0]} that the model has not; it is of another model")
        moments = MomentsReader(source, self.optimizer, self._parameters(), step=progress.step)
        random = {name: t for name, t in _random_states().items() if name in saved}
        read_into(source, targets | moments.targets | random)
        moments.convert()
        self.loaded = moments.message
        _set_random_states(random)
        if self.scaler.is_enabled() and values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])
        self.progress = progress

    def _of_model(self) -> dict[str, Tensor]:
        """Tensors of the model in checkpoints: all, or with a base those that learn."""
        state = self.model.state_dict()
        if self.base is not None:
            learned = {name for name, _ in self._parameters()}
            routers = {name.partition(".router.")[0] for name in learned if ".router." in name}
            learned |= {f"{layer}.expert_bias_E" for layer in routers}
            state = {name: tensor for name, tensor in state.items() if name in learned}
        return {f"model.{name}": tensor for name, tensor in state.items()}

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]


def read_run_state(path: Path, *names: str) -> dict[str, Any]:
    """Plain values of a run's checkpoint."""
    values = read_state(path)
    for name in names or _VALUES:
        if not isinstance(values.get(name), _VALUES[name]):
            raise CheckpointError(f"{path / 'state.json'}: has no usable {name}; choose another checkpoint")
    return values


_FIXED = ("model.", "distill.", "base.", "objective.", "tokens.")
"""Sections of options that do not change when a run goes on."""


def check_same_run(saved: Mapping[str, Any], config: RunConfig, *, family: Family, where: Path) -> None:
    """Check that a run can be resumed with a configuration: the model must be the same.

    Steps, batch size, learning rate, schedule, device and dtype (except float64) may change.

    Args:
        where: path, for errors.
    """
    of_family = saved.get("family", DEFAULT.name)
    if of_family != family.name:
        raise ConfigError(
            "family",
            family.name,
            f"the run in {where} has {of_family}",
            f"use that value, or another {named('train.run_dir')}",
        )
    try:
        with saved_run():  # options added since then get their defaults
            before = family.config.model_validate(dict(saved))
    except ConfigError as error:
        raise ConfigError(f"the run in {where} cannot go on: {error.line.text}") from None
    old_fields, new_fields = (dotted_values(run.model_dump(mode="json")) for run in (before, config))
    for name, value in sorted(new_fields.items(), key=_is_of_model):  # which follows from other options
        is_fixed = name.startswith(_FIXED) or name in (
            "train.seed",
            "optim.name",
            *family.fixed,
        )
        if is_fixed and name not in family.free and differs(name, old_fields.get(name), value):
            raise ConfigError(
                name,
                value,
                f"the run in {where} has {old_fields.get(name)}",
                f"use that value, or another {named('train.run_dir')}",
            )
    doubles = [run.train.dtype == "float64" for run in (before, config)]
    if doubles[0] != doubles[1]:
        raise ConfigError(
            "train.dtype",
            config.train.dtype,
            f"the run in {where} keeps its weights in {'float64' if doubles[0] else 'float32'}",
            f"use a dtype that does, or another {named('train.run_dir')}",
        )


def _is_of_model(option: tuple[str, Any]) -> bool:
    return option[0].startswith("model.")


def differs(name: str, before: Any, now: Any) -> bool:
    """Whether an option, by its dotted name, has another value; paths of runs are compared after resolving."""
    if name in _RUNS and isinstance(before, str) and isinstance(now, str):
        return before != now and expanded(before).resolve() != expanded(now).resolve()
    return bool(before != now)


def check_same_data(saved_key: str, data: Data, *, where: Path) -> None:
    """Check that a run is resumed with the same data: in other data the saved position would mean other samples."""
    if saved_key != data.key:
        raise ConfigError(
            f"data: {data.description}, are not what the run in {where} was trained on; use the same data options and "
            f"files, or another {named('train.run_dir')}"
        )


def _random_states() -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on the CPU leaves the GPUs of its machine alone
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    if "random.cpu" in states:
        torch.set_rng_state(states["random.cpu"])
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"])
