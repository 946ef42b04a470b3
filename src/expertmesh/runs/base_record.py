"""The record that checkpoints of adapters have of their base."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from expertmesh.checkpoints.rounded import ExpertFormat
from expertmesh.checkpoints.store import read_state
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.base import saved_run
from expertmesh.errors import CheckpointError, ConfigError, named
from expertmesh.text.new_tokens import GrownVocabulary

BASE = "base"
"""Name of a base's record among the values of a checkpoint."""
_ENDS = 1 << 20
_ROUNDS, _GROWN = "experts", "tokens"
_WORDS = ("*.json", "*.safetensors")


def base_record(base: Any) -> dict[str, str]:
    """Record of a base: its folder, its weights and their digest, the format that its experts are rounded to, and its
    added tokens."""
    weights = base.checkpoint
    found = {"path": str(base.path), "weights": str(weights), "digest": digest_of(weights)}
    more = {_ROUNDS: base.rounds, _GROWN: base.grown}
    return found | {name: one.text for name, one in more.items() if one is not None}


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
    """Check that adapters are continued on the weights that they were trained on."""
    before = _record(saved, where=where)
    if before["digest"] != own["digest"]:
        raise ConfigError(
            "train.init_from",
            own["path"],
            f"its weights are not those of {before['path']}, on which the adapters of {where} were trained",
            f"restore that folder, or use another {named('train.run_dir')}",
        )
    if before.get(_ROUNDS) != own.get(_ROUNDS):
        raise ConfigError(
            "train.dtype",
            own.get(_ROUNDS, "").rpartition(" ")[2],
            f"gives experts in {own.get(_ROUNDS)}, and the adapters of {where} were trained on {before.get(_ROUNDS)}",
            f"use the type of the run, or another {named('train.run_dir')}",
        )


class BaseRecord(NamedTuple):
    """Base of a checkpoint's adapters."""

    path: Path
    weights: Path  # its checkpoint, or the folder
    rounds: ExpertFormat | None  # format that its experts were rounded to for the training; None: as they are
    config: AdapterConfig  # options of the adapters
    grown: GrownVocabulary | None  # vocabulary of the training; None: that of the base


def read_record(checkpoint: Path) -> BaseRecord | None:
    """The base of a checkpoint's adapters; None: all weights are in the checkpoint."""
    values = read_state(checkpoint)
    if BASE not in values:
        return None
    record = _record(values[BASE], where=checkpoint)
    weights = Path(record["weights"])
    if not weights.is_dir():
        raise ConfigError(f"{checkpoint}: has adapters for {weights}, which is gone; bring it back to this place")
    if digest_of(weights) != record["digest"]:
        raise CheckpointError(
            f"{checkpoint}: has adapters for {weights}, which has changed since; restore it from a copy"
        )
    with saved_run():
        config = AdapterConfig.model_validate(values["config"]["adapter"])
    rounds = ExpertFormat.of(record[_ROUNDS]) if _ROUNDS in record else None
    grown = GrownVocabulary.of(record[_GROWN]) if _GROWN in record else None
    return BaseRecord(Path(record["path"]), weights, rounds, config, grown)


def _record(saved: Any, *, where: Path) -> Mapping[str, str]:
    names = ("path", "weights", "digest")
    if not isinstance(saved, Mapping) or not all(isinstance(saved.get(n), str) for n in names):
        raise CheckpointError(f"{where}: does not say which base its adapters are for; choose another")
    return saved
