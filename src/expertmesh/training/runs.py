"""Runs below a folder: how far each is, what it reached, how large it is; and removing their old checkpoints."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from expertmesh.checkpoints.store import CheckpointStore, list_checkpoints, newest_good, step_of
from expertmesh.errors import ConfigError
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.metrics import evaluations, read_metrics


@dataclass(frozen=True)
class ListedRun:
    """One run.

    Attributes:
        path: its folder.
        recipe: name of the recipe; "?" where its configuration cannot be read.
        step: steps done.
        steps: that it is to do, or None.
        loss: of the last step, or None.
        evaluation: last validation loss, or None.
        num_checkpoints: of it.
        num_bytes: of all its files.
        is_running: whether a process has it.
    """

    path: Path
    recipe: str
    step: int
    steps: int | None
    loss: float | None
    evaluation: float | None
    num_checkpoints: int
    num_bytes: int
    is_running: bool


def find_runs(folder: Path) -> list[Path]:
    """Run directories below a folder, or the folder itself, by name; links are not followed.

    Raises:
        ConfigError: it is no folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; give the one that runs are in")
    return sorted(_runs_below(folder))


def _runs_below(folder: Path) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        path = Path(place)
        if "config.json" in files and ("checkpoints" in below or "metrics.jsonl" in files):
            yield path
            below.clear()


def look_at(path: Path) -> ListedRun:
    """What there is of a run, of one that is damaged or still trains, too."""
    run = RunDir(path)
    try:
        values, recipe = run.read_values()
        steps = values["train"]["steps"]
    except (ConfigError, KeyError, TypeError):
        recipe, steps = "?", None
    rows, paths = read_metrics(run.metrics), list_checkpoints(run.checkpoints)
    found = [one["loss"] for one in evaluations(rows) if "loss" in one]
    done = [row["step"] for row in rows] + [step_of(one) for one in paths]
    return ListedRun(
        path=path,
        recipe=recipe,
        step=max(done, default=0),
        steps=steps if isinstance(steps, int) else None,
        loss=rows[-1]["loss"] if rows else None,
        evaluation=found[-1] if found else None,
        num_checkpoints=len(paths),
        num_bytes=_bytes_of(path),
        is_running=run.is_held(),
    )


def remove_old(path: Path, *, keep: int) -> int:
    """Remove a run's checkpoints but the newest ones, the best, and those of its `train.keep_every`.

    The newest one that is whole stays in any case.

    Args:
        path: the run directory.
        keep: how many of the newest stay.

    Returns:
        Bytes of what was removed.

    Raises:
        ConfigError: a process has the run, or its configuration cannot be read.
        CheckpointError: all its checkpoints are damaged; none is removed.
    """
    run = RunDir(path)
    values, _ = run.read_values()
    with run.locked():
        whole = newest_good(run.checkpoints)
        if whole is None:
            return 0
        before = _bytes_of(run.checkpoints)
        every = values.get("train", {}).get("keep_every")
        store = CheckpointStore(run.checkpoints, keep_last=keep, keep_every=every)
        try:
            store.remove_leftovers()
            store.prune(step_of(whole))
        finally:
            store.close()
        return before - _bytes_of(run.checkpoints)


def _bytes_of(folder: Path) -> int:
    sizes = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                sizes += Path(place, name).lstat().st_size
            except FileNotFoundError:  # a run that trains has just removed it
                continue
    return sizes
