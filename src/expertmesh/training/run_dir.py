"""The run directory: names of its files, the lock, and how other verbs open a run."""

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from expertmesh.config.run import Resume, RunConfig
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.training.checkpoint import newest_good

_PACKAGES = ("expertmesh", "torch", "numpy", "pydantic", "tokenizers", "safetensors")


class RunDir:
    """Paths below a run directory, and the checks on opening it.

    Args:
        path: the folder; made when the run is opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / "config.json"
        self.arithmetic = self.path / "arithmetic.json"
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tokenizer = self.path / "tokenizer.json"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.lock = self.path / "lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this process. The system drops the lock when the process dies, however it dies.

        Raises:
            ConfigError: another process holds it, or the path is no folder that can be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"train.run_dir={self.path}: is a file or below a file; choose a folder"
            ) from None
        with self.lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ConfigError(
                    f"train.run_dir={self.path}: is in use by process {holder}; wait for it, or choose another"
                    " directory"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def has_run(self) -> bool:
        """Whether there is anything of a run that must not be overwritten."""
        return any(p.exists() for p in (self.config, self.metrics, self.checkpoints))

    def check_resume(self, resume: Resume) -> None:
        """Whether `resume` fits what is there.

        Raises:
            ConfigError: "never" and there is a run, or "required" and there is none.
        """
        if resume == "never" and self.has_run():
            raise ConfigError(
                f"train.run_dir={self.path}: already holds a run; continue it with train.resume=auto, or choose another"
                " train.run_dir"
            )
        if resume == "required" and not self.checkpoints.is_dir():
            raise ConfigError(
                f"train.resume=required: {self.path} holds no checkpoint; check train.run_dir, or use"
                " train.resume=auto"
            )

    def write_description(self, config: RunConfig, *, recipe: str, tokenizer: Path) -> None:
        """Write config.json, versions.json and tokenizer.json, each by one rename."""
        values = {"recipe": recipe, **config.model_dump(mode="json")}
        _write_json(self.config, values)
        _write_json(self.versions, versions())
        partial = self.tokenizer.with_suffix(".partial")
        shutil.copyfile(tokenizer, partial)
        partial.rename(self.tokenizer)

    def read_config(self) -> tuple[RunConfig, str]:
        """The resolved configuration and the recipe's name.

        Raises:
            ConfigError: there is none, or it is unreadable.
        """
        try:
            values = json.loads(self.config.read_bytes())
            recipe = values.pop("recipe", "unknown")
        except FileNotFoundError:
            raise ConfigError(
                f"run {self.path}: has no config.json; give the directory of a training run"
            ) from None
        except (ValueError, AttributeError, OSError):
            raise ConfigError(
                f"run {self.path}: config.json is unreadable; restore it from a copy"
            ) from None
        return RunConfig.model_validate(values), str(recipe)


class Run(NamedTuple):
    """A run on disk.

    Attributes:
        config: resolved configuration.
        arithmetic: file of what it computes in; see `training.arithmetic`.
        tokenizer: its tokenizer file.
        checkpoint: its newest checkpoint that is not damaged.
    """

    config: RunConfig
    arithmetic: Path
    tokenizer: Path
    checkpoint: Path


def load_run(run_dir: str | Path) -> Run:
    """Open a finished or stopped run; does not lock it.

    Raises:
        ConfigError: this is no run directory.
        CheckpointError: it has no usable checkpoint or no tokenizer.
    """
    folder = RunDir(run_dir)
    if not folder.path.is_dir():
        raise ConfigError(f"run {run_dir}: does not exist; train one with: expertmesh train")
    config, _ = folder.read_config()
    checkpoint = newest_good(folder.checkpoints)
    if checkpoint is None:
        raise CheckpointError(f"run {run_dir}: has no checkpoint yet; train it first")
    if not folder.tokenizer.is_file():
        raise CheckpointError(f"run {run_dir}: has no tokenizer.json; restore it from a copy")
    return Run(config, folder.arithmetic, folder.tokenizer, checkpoint)


def versions() -> dict[str, Any]:
    """Versions of what a run depends on; null for what is not installed as a package."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1) + "\n")
    partial.rename(path)
