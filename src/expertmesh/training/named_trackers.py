"""Trackers by name (`train.trackers`): clients of tracking services that are installed here."""

import importlib
import importlib.util
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from expertmesh.config.base import dotted_values
from expertmesh.config.output_file import write_whole
from expertmesh.config.run import TrackerName
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.training.expert_use import ExpertUse
from expertmesh.training.trackers import OwnTracker, open_tensorboard

_IDS = "trackers.json"
"""File in the run directory with the run's id at each service, so that a resumed run continues there."""
_LONGEST_PARAMETER = 500
"""Maximum length of a parameter value in MLflow."""


class WandB:
    """Weights & Biases tracker; WANDB_PROJECT and WANDB_MODE set project and mode."""

    def __init__(self, folder: Path, values: Mapping[str, Any], *, module: Any) -> None:
        kept = _kept_id(folder, "wandb") or uuid.uuid4().hex
        self._run = module.init(
            name=folder.name,
            id=kept,
            resume="allow",
            dir=str(folder),
            config=dict(values),
        )
        _keep_id(folder, "wandb", kept)

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Log the values of a step."""
        self._run.log({k: v for k, v in values.items() if k != "step"}, step=int(values["step"]))

    def close(self) -> None:
        """Send the remaining data."""
        self._run.finish()


class MLflow:
    """MLflow tracker; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set server and experiment."""

    def __init__(self, folder: Path, values: Mapping[str, Any], *, module: Any) -> None:
        self._module = module
        kept = _kept_id(folder, "mlflow")
        if kept is not None:
            module.start_run(run_id=kept, nested=True)
            return
        opened = module.start_run(run_name=folder.name, nested=True)
        texts = {name: str(value) for name, value in dotted_values(values).items()}
        module.log_params({name: text[:_LONGEST_PARAMETER] for name, text in texts.items()})
        _keep_id(folder, "mlflow", opened.info.run_id)

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Log the finite values of a step."""
        finite = {k: float(v) for k, v in values.items() if k != "step" and math.isfinite(v)}
        self._module.log_metrics(finite, step=int(values["step"]))

    def close(self) -> None:
        """End the run."""
        self._module.end_run()


class DroppedOnFailure:
    """Tracker of a service that is dropped, with one warning, at its first error: the training goes on."""

    def __init__(self, name: TrackerName, tracker: OwnTracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._is_dropped = False

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Log the values of a step, unless the service has failed before."""
        self._try(lambda: self._tracker.write(values, experts), "the run goes on without it")

    def close(self) -> None:
        """Close the tracker, unless the service has failed before."""
        self._try(self._tracker.close, "it may lack the last steps, which metrics.jsonl has")

    def _try(self, call: Callable[[], None], then: str) -> None:
        if self._is_dropped:
            return
        try:
            call()
        except Exception as error:
            self._is_dropped = True
            text = " ".join(str(error).split()) or type(error).__name__
            self._say(f"warning: {self._name}: {text}; {then}")


_CLIENTS: dict[str, Callable[..., OwnTracker]] = {"wandb": WandB, "mlflow": MLflow}


def check_installed(names: Sequence[TrackerName]) -> None:
    """Check that the clients are installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError("train.trackers", name, "is not installed", f"pip install {name}, or leave it out")


def open_trackers(
    names: Sequence[TrackerName],  # names of the services
    folder: Path,  # the run directory
    values: Mapping[str, Any],  # the configuration
    *,
    tensorboard: bool,  # whether to add TensorBoard if it is installed
    last_step: int,  # number of steps done
    say: Callable[[str], None],  # receiver of the warning that a service is dropped
) -> list[OwnTracker]:
    """Open the trackers of a run."""
    check_installed(names)
    found: list[OwnTracker] = []
    if tensorboard or "tensorboard" in names:
        found += open_tensorboard(folder / "tensorboard", last_step=last_step)
    for name in names:
        if name in _CLIENTS:
            tracker = _CLIENTS[name](folder, values, module=importlib.import_module(name))
            found.append(DroppedOnFailure(name, tracker, say))
    return found


def _ids(folder: Path) -> dict[str, Any]:
    path = folder / _IDS
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is damaged; delete it, and services begin a new run")
    return found


def _kept_id(folder: Path, name: str) -> str | None:
    found = _ids(folder).get(name)
    return found if isinstance(found, str) else None


def _keep_id(folder: Path, name: str, value: str) -> None:
    write_whole(folder / _IDS, json.dumps(_ids(folder) | {name: value}))
