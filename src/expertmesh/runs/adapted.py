"""The base of a run with adapters: its record in checkpoints, and the weights of both together."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from expertmesh.checkpoints.adapted import AdaptedModel
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.source import TensorSource
from expertmesh.checkpoints.store import read_state
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.base import saved_run
from expertmesh.errors import CheckpointError, ConfigError, named

BASE = "base"
"""Name of a base's record among the values of a checkpoint."""
_ENDS = 1 << 20
_WORDS = ("*.json", "*.safetensors")


def base_record(path: Path, weights: Path) -> dict[str, str]:
    """Record of a base: its folder, its weights and their digest.

    Args:
        path: folder of a run or of the hub.
        weights: a checkpoint of the run, or the hub's folder.
    """
    return {"path": str(path), "weights": str(weights), "digest": digest_of(weights)}


def digest_of(weights: Path) -> str:
    """Digest of a base's weights: the manifest of a checkpoint; names, sizes and ends of the files of a hub folder."""
    manifest = weights / "manifest.json"
    files = [manifest] if manifest.is_file() else sorted(p for w in _WORDS for p in weights.glob(w))
    found = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            found.update(stream.read(_ENDS))
            stream.seek(max(size - _ENDS, 0))
            found.update(stream.read(_ENDS))
    return found.hexdigest()


def check_same_base(saved: Any, own: Mapping[str, str], *, where: Path) -> None:
    """Check that adapters are continued on the weights that they were trained on.

    Args:
        saved: record in the checkpoint.
        own: record of the run that continues.
        where: the checkpoint, for errors.

    Raises:
        ConfigError: they are others.
    """
    before = _record(saved, where=where)
    if before["digest"] != own["digest"]:
        raise ConfigError(
            "train.init_from",
            own["path"],
            f"its weights are not those of {before['path']}, on which the adapters of {where} were trained",
            f"restore that folder, or use another {named('train.run_dir')}",
        )


def checkpoint_weights(checkpoint: Path, dtype: torch.dtype | None = None) -> TensorSource:
    """Weights of a run's checkpoint by the names of its model; adapters are merged into those of their base.

    Args:
        checkpoint: the checkpoint.
        dtype: type of the weights of a base in the hub's format; None: the type of its files.

    Raises:
        ConfigError: there is no base any more.
        CheckpointError: the base has changed, or the checkpoint is unreadable.
    """
    own, values = Checkpoint(checkpoint, prefix="model."), read_state(checkpoint)
    if BASE not in values:
        return own
    base, config = find_base(checkpoint)
    return AdaptedModel(base.open_weights(dtype), own, config)


def find_base(checkpoint: Path) -> tuple[Any, AdapterConfig]:
    """The `Run` that the adapters of a checkpoint are for, with its weights, and the adapters' options.

    Raises:
        ConfigError: there is no such folder any more.
        CheckpointError: it has changed.
    """
    from expertmesh.runs.open import find_model

    values = read_state(checkpoint)
    record = _record(values.get(BASE), where=checkpoint)
    path, weights = Path(record["path"]), Path(record["weights"])
    if not weights.is_dir():
        raise ConfigError(
            f"{checkpoint}: has adapters for {weights}, which is gone; bring it back to this place"
        )
    if digest_of(weights) != record["digest"]:
        raise CheckpointError(
            f"{checkpoint}: has adapters for {weights}, which has changed since; restore it from a copy"
        )
    with saved_run():
        config = AdapterConfig.model_validate(values["config"]["adapter"])
    return replace(find_model(path), weights=weights), config


def _record(saved: Any, *, where: Path) -> Mapping[str, str]:
    names = ("path", "weights", "digest")
    if not isinstance(saved, Mapping) or not all(isinstance(saved.get(n), str) for n in names):
        raise CheckpointError(
            f"{where}: does not say which base its adapters are for; choose another"
        )
    return saved
