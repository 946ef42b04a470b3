"""Files of a run that its weights mean nothing without: a checkpoint records them, and what opens it compares.

The model's configuration and the files of the family (tokenizer.json, classes.json) lie beside the checkpoints, where
anything can be copied over them. Options of training, data and device may differ.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertmesh.config.base import dotted_values, parse_json, saved_run
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.family import Family

RECORD = "files"
"""Name of the hashes in the values of a checkpoint; older ones have none."""
_SHOWN = 12


def hashes_of(files: Mapping[str, Path], family: Family) -> dict[str, str]:
    """SHA-256 of the family's files.

    Args:
        files: files by their names in a run.
        family: family of the run.
    """
    return {name: _sha256(files[name]) for name in family.files if name in files}


def check_files(
    files: Mapping[str, Path], state: Mapping[str, Any], family: Family, *, where: Path
) -> None:
    """Check that files are those that a checkpoint was trained with.

    Args:
        files: files by their names in a run.
        state: values of the checkpoint.
        family: family of the run.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: a file is another one.
    """
    known = state.get(RECORD)
    for name, found in hashes_of(files, family).items():
        expected = known.get(name) if isinstance(known, Mapping) else None
        if isinstance(expected, str) and found != expected:
            raise CheckpointError(
                f"{files[name]}: has the SHA-256 {found[:_SHOWN]}..., and {where} was trained with {expected[:_SHOWN]}...; restore"
                " the file of this run from a copy"
            )


def check_run(
    run: Path, values: Mapping[str, Any], state: Mapping[str, Any], family: Family, *, where: Path
) -> None:
    """Check that one of a run's checkpoints was trained with the files of the run.

    Args:
        run: the run directory.
        values: values of its config.json.
        state: values of the checkpoint.
        family: family of the run.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: a file, or an option of the model, is of another run.
    """
    saved = state.get("config")
    if isinstance(saved, Mapping) and saved.get("family", family.name) == family.name:
        before, now = (_model_of(found, family, run) for found in (saved, values))
        for name in [*before, *(name for name in now if name not in before)]:
            if name not in family.free and before.get(name) != now.get(name):
                raise CheckpointError(
                    f"{run / 'config.json'}: has {name}={now.get(name)}, and {where} was trained with {before.get(name)};"
                    " restore the file of this run from a copy"
                )
    present = {name: run / name for name in family.files if (run / name).is_file()}
    check_files(present, state, family, where=where)


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


def _model_of(values: Mapping[str, Any], family: Family, run: Path) -> dict[str, Any]:
    """Options of the model by dotted name, those added since included."""
    try:
        with saved_run():
            config = family.config.model_validate(dict(values))
    except ConfigError as error:
        raise CheckpointError(f"run {run}: its model is not readable: {error.line.text}") from None
    return dotted_values(config.model.model_dump(mode="json"), "model")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
