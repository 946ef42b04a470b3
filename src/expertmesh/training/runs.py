"""List of the runs below a folder with progress, loss and size, and removal of old checkpoints."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertmesh.checkpoints.store import CheckpointStore, list_checkpoints, newest_good, step_of
from expertmesh.config.input_folder import check_only_files
from expertmesh.errors import ConfigError
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.metrics import evaluations, read_metrics


@dataclass(frozen=True)
class ListedRun:
    """Summary of a run."""

    path: Path  # run directory
    recipe: str  # name of the recipe; "?" if the configuration is unreadable
    step: int  # number of steps done
    steps: int | None  # number of steps configured, or None
    loss: float | None  # loss of the last step, or None
    evaluation: float | None  # last validation loss, or None
    num_checkpoints: int
    num_bytes: int  # size of all files
    is_running: bool  # whether a process holds the run's lock


def find_runs(folder: Path) -> list[Path]:
    """Run directories below a folder, or the folder itself, by name; links are not followed."""
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
    """Summary of a run, which may be damaged or in training; nothing is read where pipes or devices stand for files."""
    run = RunDir(path)
    rows: list[dict[str, Any]] = []
    try:
        check_only_files(path, what=f"run {path}")
        rows = read_metrics(run.metrics)
        values, recipe = run.read_values()
        steps = values["train"]["steps"]
    except (ConfigError, KeyError, TypeError):
        recipe, steps = "?", None
    paths = list_checkpoints(run.checkpoints)
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
    """Remove old checkpoints of a run; the newest ones, the best, and multiples of its `train.keep_every` are kept.

    The newest undamaged checkpoint is always kept.

    Returns:
        Number of bytes removed.
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
            except FileNotFoundError:  # a running training has just removed it
                continue
    return sizes
