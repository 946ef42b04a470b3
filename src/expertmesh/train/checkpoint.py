"""Checkpoints: torch.distributed.checkpoint files, made visible by one rename, checked by a manifest of SHA-256.

    checkpoints/step_00000200/
        manifest.json            size and SHA-256 of the other files, written last
        state.json               step, data position, configuration, format version, ...
        .metadata, __0_0.distcp  all tensors

A checkpoint is written into a hidden folder, flushed to disk and renamed. So a folder with a visible name is complete
unless the disk damaged it, and then the manifest tells.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from expertmesh.errors import CheckpointError

FORMAT_VERSION = 1
_PREFIX = "step_"
_PARTIAL = ".partial-"
_DELETED = ".deleted-"
_BLOCK = 1 << 22

_log = logging.getLogger("expertmesh.checkpoint")


class CheckpointStore:
    """The checkpoints of one run. One process at a time (the run directory's lock sees to that).

    Args:
        folder: holds the checkpoints; made when the first is saved.
        keep_last: the newest so many are kept, and the one with the lowest evaluation loss.
    """

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self._staging: dict[str, Tensor] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def remove_leftovers(self) -> None:
        """Delete what a killed process left half-written or half-deleted."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((_PARTIAL, _DELETED)):
                    shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        eval_loss: float | None,
    ) -> None:
        """Copy the tensors, then write them in the background; training may go on at once.

        Waits for the save before, if that still runs.

        Args:
            step: names the checkpoint.
            tensors: by name, on any device.
            state: plain JSON values.
            eval_loss: of the model as it is now, if known; the lowest is kept as the best.

        Raises:
            OSError: the save before failed (disk full, ...).
        """
        self.wait()
        for name, tensor in tensors.items():
            copy = self._staging.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                self._staging[name] = tensor.detach().to("cpu", copy=True)
            else:
                copy.copy_(tensor.detach())
        staged = {name: self._staging[name] for name in tensors}
        header = {"format_version": FORMAT_VERSION, "step": step, "eval_loss": eval_loss}
        text = json.dumps({**header, **state}, indent=1)
        self._pending = self._executor.submit(self._write, step, staged, text)

    def check(self) -> None:
        """Raise the error of a finished save, if it failed; does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that runs, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the background thread; errors of its last save are raised by `wait`, not here."""
        self._executor.shutdown(wait=True)

    def paths(self) -> list[Path]:
        """Visible checkpoints, oldest first, damaged ones included."""
        return list_checkpoints(self.folder)

    def _write(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        final = self.folder / f"{_PREFIX}{step:08d}"
        partial = self.folder / f"{_PARTIAL}{final.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_tensors(partial, tensors)
            (partial / "state.json").write_text(state)
            _write_manifest(partial)
            if final.exists():
                self._delete(final)
            partial.rename(final)
            _sync(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune()

    def _prune(self) -> None:
        paths = self.paths()
        keep = set(paths[-self.keep_last :])
        rated = [(loss, path) for path in paths if (loss := _eval_loss(path)) is not None]
        if rated:
            keep.add(min(rated)[1])
        for path in paths:
            if path not in keep:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        """Hide, then delete: a killed process leaves no visible folder with missing files."""
        hidden = path.with_name(_DELETED + path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Visible checkpoints in a folder, oldest first, damaged ones included."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.startswith(_PREFIX) and p.is_dir())


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint that is not damaged; warns of each damaged one that is newer.

    Args:
        folder: holds the checkpoints.

    Returns:
        Its path; None if there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        problem = find_damage(path)
        if problem is None:
            return path
        _log.warning("checkpoint %s is damaged (%s); using the one before", path, problem)
    if paths:
        raise CheckpointError(
            f"{folder}: all {len(paths)} checkpoints are damaged; restore one from a copy, or train anew in another"
            " train.run_dir"
        )
    return None


def find_damage(path: Path) -> str | None:
    """Compare a checkpoint with its manifest; reads all of it.

    Returns:
        What is wrong, or None.
    """
    try:
        files = json.loads((path / "manifest.json").read_bytes())["files"]
        for name, expected in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["size"]:
                return f"{name} has {file.stat().st_size} bytes, not {expected['size']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is missing or unreadable"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint.

    Raises:
        CheckpointError: unreadable, or of a newer format.
    """
    try:
        state = json.loads((path / "state.json").read_bytes())
        version = state["format_version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{path / 'state.json'}: is unreadable; choose another checkpoint"
        ) from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: has format version {version}, this program reads {FORMAT_VERSION}; use the matching version"
        )
    return cast("dict[str, Any]", state)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one rank of torch.distributed.checkpoint does, without a process group.

    Uses the planner and the writer directly: `save` would warn that there is no process group, and hide an OSError.
    """
    planner = DefaultSavePlanner()
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local_plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner)
    results.wait()
    writer.finish(metadata, [results.value()])


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill given tensors from a checkpoint, in place; tensors of the checkpoint that are not asked for are left out.

    Args:
        folder: the checkpoint.
        tensors: by name; shapes must be those of the checkpoint.

    Raises:
        CheckpointError: one is not in the checkpoint or has another shape there.
    """
    saved = tensor_shapes(folder)
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(f"{folder}: has no tensor {name}; it is of another model")
        if saved[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {saved[name]}, the model's is {tuple(tensor.shape)}; it is of another model"
            )
    planner, reader = DefaultLoadPlanner(), FileSystemReader(folder)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local_plan = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local_plan]))
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plans[0]), planner).wait()


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: tuple(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _eval_loss(path: Path) -> float | None:
    try:
        loss = read_state(path)["eval_loss"]
    except (CheckpointError, KeyError):
        return None
    return float(loss) if isinstance(loss, int | float) else None


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in _files(folder):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
        }
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    _sync(manifest)
    _sync(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
