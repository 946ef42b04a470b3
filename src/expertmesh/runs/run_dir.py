"""The run directory: names of its files, its lock, and `Run`, a run on disk as other commands open it."""

import fcntl
import json
import os
import platform
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from expertmesh.checkpoints.compressed_tensors import quantization_of, scheme_of
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.grown_rows import GrownRows
from expertmesh.checkpoints.hub.load_pretrained import HubModel, hub_run_config, is_hub_folder
from expertmesh.checkpoints.kept_experts import Fp8Experts, format_of_files
from expertmesh.checkpoints.merged_adapters import AdaptedModel
from expertmesh.checkpoints.peft_folder import CONFIG as ADAPTERS
from expertmesh.checkpoints.rounded import ExpertFormat, RoundedExperts, WidenedExperts
from expertmesh.checkpoints.source import TensorSource, read_into
from expertmesh.checkpoints.store import list_checkpoints, newest_good, read_state
from expertmesh.config.adapter import AdapterConfig
from expertmesh.config.base import expanded, parse_json, saved_run
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.input_folder import check_only_files
from expertmesh.config.output_file import check_file, check_folder, complete, naming, write_whole
from expertmesh.config.run import Resume, RunConfig
from expertmesh.errors import CheckpointError, ConfigError, command, named
from expertmesh.models.bound_files import check_run
from expertmesh.models.family import Family
from expertmesh.models.gpt.family import GPT
from expertmesh.models.own_module import FAMILY_NAME
from expertmesh.models.registry import FAMILIES
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.base_record import read_record
from expertmesh.runs.quantized import PackedExperts, open_quantized
from expertmesh.text.new_tokens import GrownVocabulary
from expertmesh.text.tokenizer import load_tokenizer

TOKENIZER = "tokenizer.json"
"""File name of a run's tokenizer."""
_PACKAGES = ("expertmesh", "torch", "numpy", "pydantic", "tokenizers")


class RunDir:
    """Paths in a run directory, and the checks on opening it. `path`: the folder; made by `locked`."""

    def __init__(self, path: str | Path) -> None:
        self.path = expanded(path)
        self.config = self.path / "config.json"
        self.arithmetic = self.path / "arithmetic.json"
        self.plans = self.path / "dispatch_plans.json"
        self.versions = self.path / "versions.json"
        self.metrics = self.path / "metrics.jsonl"
        self.experts = self.path / "experts.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.records = (self.metrics, self.experts)
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.lock = self.path / "lock"
        self._is_described = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Context that locks the directory for this process. The system drops the lock when the process dies.

        Files created inside the context are deleted on exit unless `write_description` was called, so a refused run
        leaves nothing.
        """
        files = (self.lock, self.arithmetic, self.plans, self.config, self.versions)
        folders = (self.path, *self.path.parents)
        new_files, new_folders = ([p for p in ps if not p.exists()] for ps in (files, folders))
        with self._hold() as file:
            try:
                with naming(self.lock):
                    file.truncate(0)
                    file.write(f"{os.getpid()}\n".encode())
                yield
            finally:
                if not self._is_described:
                    for path in new_files:
                        path.unlink(missing_ok=True)
                    with suppress(OSError):  # somebody else has put something there
                        for folder in new_folders:
                            folder.rmdir()

    def _hold(self) -> FileIO:
        """The lock file, open and locked."""
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ConfigError("train.run_dir", self.path, "is a file or below a file", "choose a folder") from None
            file = self.lock.open("a+b", buffering=0)
            try:
                with naming(self.lock):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with file:
                    if not isinstance(error, BlockingIOError):
                        raise  # there are no locks on this file system
                    file.seek(0)
                    holder = file.read().decode().strip() or "unknown"
                raise ConfigError(
                    "train.run_dir",
                    self.path,
                    f"is in use by process {holder}",
                    "wait for it, or choose another directory",
                ) from None
            if self.lock.exists() and os.path.samestat(self.lock.stat(), os.fstat(file.fileno())):
                return file
            file.close()  # its former holder has just removed it

    def check_writable(self) -> None:
        """Try all that a run will write here, before its first step."""
        if not next(one for one in (self.path, *self.path.absolute().parents) if one.exists()).is_dir():
            raise ConfigError("train.run_dir", self.path, "is a file or below a file", "choose a folder")
        for path in (self.config, self.arithmetic, self.plans, self.versions, *self.records):
            check_file(path)
        for path in (self.checkpoints, self.tensorboard):
            check_folder(path)

    def is_held(self) -> bool:
        """Whether a process holds the directory now."""
        if not self.lock.is_file():  # a pipe would be waited for
            return False
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no lock, or there are none here
            return False
        return False

    def has_run(self) -> bool:
        """Whether the folder has files of a run, which must not be overwritten."""
        return any(p.exists() for p in (self.config, self.metrics, self.checkpoints))

    def check_resume(self, resume: Resume) -> None:
        """Refuse a `resume` that does not fit the folder."""
        if resume == "never" and self.has_run():
            raise ConfigError(
                "train.run_dir",
                self.path,
                "already holds a run",
                f"continue it with {named('train.resume', 'auto')}, or choose another {named('train.run_dir')}",
            )
        if resume == "required" and not list_checkpoints(self.checkpoints):
            raise ConfigError(
                "train.resume",
                "required",
                f"{self.path} holds no checkpoint",
                f"check {named('train.run_dir')}, or use {named('train.resume', 'auto')}",
            )

    def write_description(self, config: RunConfig, *, recipe: str, files: Mapping[str, Path]) -> None:
        """Write config.json, versions.json and copies of the data's files, each by one rename."""
        values = {"recipe": recipe, **config.model_dump(mode="json")}
        with naming(self.path):
            write_whole(self.config, json.dumps(values, indent=1) + "\n")
            write_whole(self.versions, json.dumps(versions(), indent=1) + "\n")
            for name, source in files.items():
                target = self.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with complete(target) as partial:
                    shutil.copyfile(source, partial)
        self._is_described = True

    def read_values(self, *, is_quantized: bool = False) -> tuple[dict[str, Any], str]:
        """(resolved configuration as plain values, name of the recipe)."""
        if not self.path.is_dir():
            what = "is no folder" if self.path.exists() else "does not exist"
            raise ConfigError(f"run {self.path}: {what}; train one with: {command('train')}{how_to_fetch(self.path)}")
        check_only_files(self.path, what=f"run {self.path}")
        try:
            values = parse_json(self.config.read_bytes())
            recipe = values.pop("recipe", "unknown")
            if not isinstance(values.get("family", GPT.name), str):
                raise ValueError(values)
        except FileNotFoundError:
            what, fix = "has no config.json", "give the directory of a training run"
            if (self.path / ADAPTERS).is_file():
                what = "holds adapters without their model"
                fix = "give the model that they are for, and the folder as its adapter"
            raise ConfigError(f"run {self.path}: {what}; {fix}") from None
        except (ValueError, AttributeError, TypeError, OSError):
            raise ConfigError(f"run {self.path}: config.json is unreadable; restore it from a copy") from None
        if is_quantized:
            del values["quantization_config"], values["dtype"]
        if "quantization_config" in values:
            raise ConfigError(
                f"run {self.path}: is quantised: it answers ({command('generate')}, em.Engine), and does nothing else; "
                "give the run or the model that it was made of"
            )
        if "model_type" in values:
            raise ConfigError(
                f"run {self.path}: is a model in the hub's format; make it a run with: "
                f"{command(f'convert --from {shlex.quote(str(self.path))} --to DIR')}"
            )
        return values, str(recipe)

    def read_config(self, family: Family | None = None, *, is_quantized: bool = False) -> tuple[RunConfig, Family]:
        """(resolved configuration, its family).

        Args:
            family: the family, if it is none of this package: no module is imported because a run names it.
        """
        values, _ = self.read_values(is_quantized=is_quantized)
        name = values.get("family", GPT.name)
        family = FAMILIES.get(name) if family is None else family
        if family is None:
            is_module = name == FAMILY_NAME
            fix = (
                "load it by expertmesh.load(run, module=...)"
                if is_module
                else "name the family as module:name, in Python as family=..."
            )
            raise ConfigError(f"run {self.path}: is of family {name}, which is not of this package; {fix}")
        if family.name != name:
            raise ConfigError("family", family.name, f"the run {self.path} is of family {name}", "name that one")
        with saved_run():
            return family.config.model_validate(values), family


@dataclass(frozen=True)
class Run:
    """A run on disk, or a hub or quantised folder as one."""

    path: Path
    config: RunConfig  # resolved configuration
    family: Family  # family of the model
    # the chosen checkpoint, see `with_weights`, or the folder itself for a hub or quantised one; None: not chosen yet
    weights: Path | None = None
    is_quantized: bool = False  # whether the folder has quantised weights
    # format that dense experts are rounded to while they are read; None: they stay as they are
    rounds: ExpertFormat | None = None
    grown: GrownVocabulary | None = None  # vocabulary with added tokens; None: that of the folder

    @property
    def is_hub(self) -> bool:
        """Whether the weights are in the folder itself: a hub or quantised one."""
        return self.weights == self.path

    @property
    def checkpoint(self) -> Path:
        """The chosen checkpoint."""
        assert self.weights is not None
        return self.weights

    def check_trains(self) -> None:
        """Refuse quantised weights, with which no training can begin."""
        if self.is_quantized:
            raise ConfigError(
                f"{self.path}: is quantised, and quantised weights do not learn; begin with the model that it was "
                f"made of, or use {named('adapter.kind', 'lora')}"
            )

    def packed_format(self) -> tuple[str, int] | None:
        """Format of the experts in the folder's files and columns per scale; None: they are dense."""
        if (values := quantization_of(self.path)) is not None:
            scheme = scheme_of(values, self.path)
            return scheme.format, scheme.group_size
        form = format_of_files(self.path) if self.is_hub else None
        return None if form is None else (form, 64)

    def check_whole(self) -> None:
        """Refuse a run without weights or the files of its family; reads none of them."""
        if self.weights is None and not list_checkpoints(RunDir(self.path).checkpoints):
            raise CheckpointError(f"run {self.path}: has no checkpoint yet; train it first")
        for name in self.family.files:
            if not (self.path / name).is_file():
                raise CheckpointError(f"run {self.path}: has no {name}; restore it from a copy")

    def with_weights(self, ranks: Ranks | None = None) -> "Run":
        """The run with its newest undamaged checkpoint, which is read to compare its checksums."""
        (Ranks() if ranks is None else ranks).on_all(self.check_whole)
        if self.weights is not None:
            return self
        ranks = Ranks() if ranks is None else ranks
        checkpoint = newest_good(RunDir(self.path).checkpoints, ranks)
        found = replace(self, weights=checkpoint)
        ranks.on_all(found.check_bound)
        return found

    def check_bound(self) -> None:
        """Check that the chosen checkpoint was trained with config.json and the family's files; options of `config` may
        be changed."""
        values, _ = RunDir(self.path).read_values()
        state = read_state(self.checkpoint)
        check_run(self.path, values, state, self.family, where=self.checkpoint)

    def growing(self, grown: GrownVocabulary | None) -> "Run":
        """The run with a vocabulary that has grown; None: as it is."""
        if grown is None:
            return self
        return replace(self, grown=grown, config=self.config.updated({"model.vocab_size": grown.size}))

    def open_weights(self, dtype: torch.dtype | None = None) -> TensorSource:
        """The chosen weights, by the names of the model's state dict."""
        if self.is_quantized:
            return open_quantized(self.path, self.config)
        hub = HubModel(self.path, dtype=dtype) if self.is_hub else None
        source: TensorSource = checkpoint_weights(self.checkpoint, dtype) if hub is None else hub
        if self.grown is not None:
            source = GrownRows(source, self.grown)
        if self.rounds is None:
            return source
        if hub is not None and self.rounds.format == "fp8":
            return Fp8Experts(hub, self.rounds, source)
        return RoundedExperts(source, self.rounds)

    def open_widened(self, dtype: torch.dtype | None = None) -> TensorSource:
        """The weights of `open_weights`, with quantised experts widened while they are read."""
        found = self.open_weights(dtype)
        return WidenedExperts(found) if isinstance(found, PackedExperts) else found

    def load_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of a model, or this rank's shards of them, by their names in its state dict."""
        read_into(self.open_weights(), targets)

    @property
    def vocab_size(self) -> int | None:
        """V of the model; None for a model without a vocabulary."""
        return getattr(self.config.model, "vocab_size", None)

    def load_tokenizer(self) -> Tokenizer:
        """Read the tokenizer of the run."""
        return load_tokenizer(self.path / TOKENIZER, vocab_size=self.vocab_size)

    @property
    def arithmetic(self) -> Path:
        """File of the run's `Arithmetic`; see `runs.arithmetic`."""
        return RunDir(self.path).arithmetic

    @property
    def kept_arithmetic(self) -> dict[str, Path]:
        """The file of `arithmetic` by its name, for a run that is made of this one and computes alike; empty if there
        is none."""
        return {self.arithmetic.name: self.arithmetic} if self.arithmetic.is_file() else {}


def find_run(run_dir: str | Path, family: Family | None = None) -> Run:
    """A finished or stopped run, without its weights and without locking it."""
    folder = RunDir(run_dir)
    config, family = folder.read_config(family)
    return Run(folder.path, config, family)


def find_model(path: str | Path, family: Family | None = None) -> Run:
    """Description of a folder's model; no weights are read.

    Args:
        path: a run directory, a folder in transformers' format of an architecture that runs as our GPT, or one of
            `expertmesh quantize`.
        family: family of a run, if it is none of this package.
    """
    folder = expanded(path)
    is_quantized = quantization_of(folder) is not None
    if is_hub_folder(folder):
        config = hub_run_config(folder, is_quantized=is_quantized)
        return Run(folder, config, GPT, folder, is_quantized)
    if is_quantized:
        found, family = RunDir(folder).read_config(family, is_quantized=True)
        return Run(folder, found, family, folder, is_quantized)
    return find_run(path, family)


def find_base(checkpoint: Path) -> tuple[Run, AdapterConfig] | None:
    """The run or hub folder that a checkpoint's adapters are for, with its weights, and their options; see
    `read_record`."""
    found = read_record(checkpoint)
    if found is None:
        return None
    base = replace(find_model(found.path), weights=found.weights, rounds=found.rounds)
    return base.growing(found.grown), found.config


def checkpoint_weights(checkpoint: Path, dtype: torch.dtype | None = None) -> TensorSource:
    """Weights of a run's checkpoint by the names of its model; adapters are merged into the weights of their base."""
    own, found = Checkpoint(checkpoint, prefix="model."), find_base(checkpoint)
    if found is None:
        return own
    base, config = found
    tokens = () if base.grown is None else base.grown.ids
    return AdaptedModel(base.open_widened(dtype), own, config, tokens)


def load_run(run_dir: str | Path, family: Family | None = None) -> Run:
    """A run with its newest undamaged checkpoint; raises the errors of `find_run` and `Run.with_weights`."""
    return find_run(run_dir, family).with_weights()


def versions() -> dict[str, Any]:
    """Versions of Python, machine and the packages that a run depends on; null for one that is not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
