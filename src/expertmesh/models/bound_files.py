"""Files of a run that its weights mean nothing without: a checkpoint records them, and what opens it compares.

The model's configuration, the files of the family (tokenizer.json, classes.json) and those beside its tokenizer lie
beside the checkpoints, where anything can be copied over them. Options of training, data and device may differ.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertmesh.config.base import dotted_values, parse_json, saved_run
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.family import Family
from expertmesh.text.tokenizer import EXTRAS
from expertmesh.text.tokenizer_files import files_in, is_read

RECORD = "files"
"""Name of the hashes in the values of a checkpoint; older ones have none."""
_SHOWN = 12


def hashes_in(run: Path, family: Family) -> dict[str, str]:
    """SHA-256 of all files of a run that belong to its checkpoints, by their names in the run."""
    return _hashes(_bound_in(run, family), family)


def check_files(files: Mapping[str, Path], state: Mapping[str, Any], family: Family, *, where: Path) -> None:
    """Check that files are those that a checkpoint was trained with."""
    known = state.get(RECORD)
    if not isinstance(known, Mapping):
        return
    for name, found in _hashes(files, family).items():
        expected = known.get(name)
        if expected is None and name not in family.files:
            raise CheckpointError(f"{files[name]}: is none of the files that {where} was trained with; remove it")
        if isinstance(expected, str) and found != expected:
            raise CheckpointError(
                f"{files[name]}: has the SHA-256 {found[:_SHOWN]}..., and {where} was trained with "
                f"{expected[:_SHOWN]}...; restore"
                " the file of this run from a copy"
            )


def check_run(run: Path, values: Mapping[str, Any], state: Mapping[str, Any], family: Family, *, where: Path) -> None:
    """Check that one of a run's checkpoints was trained with the files of the run."""
    saved = state.get("config")
    if (
        isinstance(saved, Mapping)
        and saved.get("family", family.name) == family.name
        and saved.get("model") != values.get("model")
    ):
        before, now = (_model_of(found, family) for found in (saved, values))
        for name in {**before, **now} if before and now else ():
            if name not in family.free and before.get(name) != now.get(name):
                raise CheckpointError(
                    f"{run / 'config.json'}: has {name}={now.get(name)}, and {where} was trained with "
                    f"{before.get(name)};"
                    " restore the file of this run from a copy"
                )
    present = _bound_in(run, family)
    check_files(present, state, family, where=where)
    for name in state.get(RECORD) or ():
        if name not in present and name not in family.files:  # a run says itself that one is lost
            raise CheckpointError(
                f"{run / name}: is missing, and {where} was trained with it; restore the file of this run from a copy"
            )


def newest_state(run: Path) -> tuple[dict[str, Any], Path]:
    """Values and path of the newest checkpoint of a run that has readable ones, undamaged or not; none: no values."""
    for path in sorted((run / "checkpoints").glob("step_????????"), reverse=True):
        try:
            state = parse_json((path / "state.json").read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict):
            return state, path
    return {}, run


def _model_of(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Options of the model by dotted name, those added since included; none if the values are not readable, which their
    readers say."""
    try:
        with saved_run():
            config = family.config.model_validate(dict(values))
    except ConfigError:
        return {}
    return dotted_values(config.model.model_dump(mode="json"), "model")


def _bound_in(run: Path, family: Family) -> dict[str, Path]:
    found = {name: run / name for name in family.files if (run / name).is_file()}
    found |= files_in(run)
    found |= {f"{EXTRAS}/{name}": path for name, path in files_in(run / EXTRAS).items()}
    return {name: path for name, path in found.items() if _is_bound(name, family)}


def _hashes(files: Mapping[str, Path], family: Family) -> dict[str, str]:
    return {name: _sha256(path) for name, path in files.items() if _is_bound(name, family)}


def _is_bound(name: str, family: Family) -> bool:
    return name in family.files or name.startswith(f"{EXTRAS}/") or is_read(name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
