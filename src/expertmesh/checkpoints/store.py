"""Checkpoints of a run: written by all ranks at once in the background, made visible by one rename, checked by SHA-256.

    checkpoints/step_00000200/
        manifest.json            size and SHA-256 of the other files, written last
        state.json               step, data position, configuration, format version, ...
        __0_0.distcp, __1_0...   the tensors: one file of each rank, with the pieces that it wrote
        .metadata                file of each piece of each tensor (torch.distributed.checkpoint)

All ranks write into one hidden folder, each a file of its own, and leave a record beside it when the file is on disk.
Rank 0 waits for the records, adds the other files and renames the folder. So a folder with a visible name is complete
unless the disk damaged it, which the manifest shows. Ranks of several machines need a shared file system.

The background threads communicate through these records alone: process groups belong to the training.
"""

import concurrent.futures
import json
import logging
import math
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from expertmesh.checkpoints.dcp import (
    Make,
    Staged,
    Stager,
    write_index,
    write_tensors,
)
from expertmesh.checkpoints.dcp_index import read_plain
from expertmesh.checkpoints.manifest import (
    FORMAT_VERSION,
    check_version,
    described,
    find_damage,
    write_manifest,
)
from expertmesh.config.base import parse_json
from expertmesh.config.output_file import naming
from expertmesh.errors import CheckpointError, PeerError, named
from expertmesh.parallel.ranks import Ranks

_PREFIX = "step_"
_NAME = re.compile(rf"{_PREFIX}\d{{8}}")
_PARTIAL = ".partial-"
_DELETED = ".deleted-"
_RECORD = ".written-"
_POLL_S = 0.01
# How long rank 0 looks for the records of the others when the run ends in an error.
_GRACE_S = 5.0

_log = logging.getLogger("expertmesh.checkpoint")


class CheckpointStore:
    """The checkpoints of one run, written by all its ranks. The run directory's lock keeps other runs out.

    Args:
        write: function that writes a rank's tensors into a folder; None: `write_tensors`.
    """

    def __init__(
        self,
        folder: Path,  # folder of the checkpoints, the same for all ranks; made when the first is saved
        *,
        keep_last: int,  # number of newest checkpoints to keep, beside the one with the lowest evaluation loss
        keep_every: int | None = None,  # checkpoints at multiples of this step are kept, too
        ranks: Ranks | None = None,  # the ranks; None: this process alone
        write: Callable[[Path, Staged], list[Any]] | None = None,
    ) -> None:
        self.folder = folder
        self.keep_last, self.keep_every = keep_last, keep_every
        self.ranks = Ranks() if ranks is None else ranks
        self.stager = Stager(self.ranks)
        self._write_tensors = write
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._is_abandoned, self._is_closing = threading.Event(), threading.Event()

    def remove_leftovers(self) -> None:
        """Delete half-written and half-deleted checkpoints of a killed run; for one rank."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                hidden = path.name.removeprefix(_PARTIAL).removeprefix(_DELETED)
                if hidden != path.name and _NAME.fullmatch(hidden):
                    shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        step: int,  # step of the training, which names the checkpoint
        tensors: Mapping[str, Tensor],  # by name, on any device; DTensors, and plain ones that are equal on all ranks
        state: Mapping[str, Any],  # plain JSON values; rank 0's are kept
        *,
        eval_loss: float | None,  # evaluation loss of the model as it is now, if known; the lowest is kept as the best
        make: Make | None = None,
    ) -> None:
        """Copy the tensors to the CPU, then write them in the background; training may go on at once.

        Every rank must call. Each copies and writes its own shards, and its share of tensors that several ranks have.
        Waits first for a previous save that still runs.

        Args:
            make: makes the tensors that are on the meta device, one at a time when they are written, in the background.
        """
        self.wait()
        partial = self.folder / f"{_PARTIAL}{_PREFIX}{step:08d}"

        def make_folder() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        self.ranks.on_rank0(make_folder)
        staged = self.stager.stage(tensors, make)
        header = {"format_version": FORMAT_VERSION, "step": step, "eval_loss": eval_loss}
        text = json.dumps({**header, **state}, indent=1)
        final = partial.with_name(partial.name.removeprefix(_PARTIAL))
        self._partial = partial
        self._pending = self._executor.submit(self._write, final, partial, staged, text)

    def check(self) -> None:
        """Raise the error of a finished save, if it failed on any rank; does not wait. Every rank must call."""
        if self._pending is not None:
            self._is_done()

    def wait(self) -> None:
        """Wait for the running save, and raise its error, also another rank's. Every rank must call."""
        while self._pending is not None and not self._is_done():
            # Rank 0's save ends last: it waits for all others.
            concurrent.futures.wait([self._pending], timeout=_POLL_S if self.ranks.size > 1 else None)

    def _is_done(self) -> bool:
        """Whether the save is over on all ranks, which clears it; raises its error."""
        assert self._pending is not None
        mine = self._pending
        error = mine.exception() if mine.done() else None
        votes = torch.tensor([error is not None, not mine.done()], dtype=torch.int64)
        votes = votes.to(self.ranks.device)
        failed, unfinished = self.ranks.sum_(votes, what="a checkpoint's end").tolist()
        if failed:
            self._pending = None
            self._fail(mine, error)
        if not unfinished:
            self._pending = None
        return not unfinished

    def _fail(self, mine: Future[None], error: BaseException | None) -> None:
        """End a save that failed on some rank and raise; `error` is this rank's own, if it failed by itself."""
        self._is_abandoned.set()
        mine.exception()
        self._is_abandoned.clear()
        errors = self.ranks.gather(_described(error))
        if self.ranks.is_leader:  # again: another rank's file may have come since
            shutil.rmtree(self._partial, ignore_errors=True)
        rank, kind, *words = next((r, *found) for r, found in enumerate(errors) if found is not None)
        if not self.ranks.is_leader:
            told = ": ".join(str(word) for word in (kind, *words) if word is not None)
            raise PeerError(f"rank {rank} could not write its part of a checkpoint: {told}") from error
        if error is not None:
            raise error
        if kind == "OSError":
            number, text, filename = words
            raise OSError(number, f"rank {rank}: {text}", filename)
        raise CheckpointError(f"rank {rank} could not write its part of a checkpoint: {kind}: {words[0]}")

    def close(self) -> None:
        """Wait for the background thread; errors of its last save are raised by `wait`, not here."""
        self._is_closing.set()
        self._executor.shutdown(wait=True)

    def paths(self) -> list[Path]:
        """Visible checkpoints, oldest first, damaged ones included."""
        return list_checkpoints(self.folder)

    def _write(self, final: Path, partial: Path, staged: Staged, state: str) -> None:
        """Write this rank's file, in the background; rank 0 also completes the checkpoint and prunes."""
        if self.ranks.is_leader:
            try:
                with naming(final, partial):
                    self._write_rest(final, partial, staged, state)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self.prune(step_of(final))
        else:
            record = partial / f"{_RECORD}{self.ranks.position}"
            unfinished = record.with_suffix(".partial")
            unfinished.write_bytes(pickle.dumps(self._write_part(partial, staged)))
            unfinished.rename(record)

    def _write_part(self, partial: Path, staged: Staged) -> tuple[list[Any], dict[str, Any]]:
        results = (self._write_tensors or write_tensors)(partial, staged)
        files = [partial / name for name in sorted({r.storage_data.relative_path for r in results})]
        return results, {path.name: _flushed(path) for path in files}

    def _write_rest(self, final: Path, partial: Path, staged: Staged, state: str) -> None:
        parts = [self._write_part(partial, staged)]
        parts += [self._record(partial / f"{_RECORD}{rank}") for rank in range(1, self.ranks.size)]
        write_index(partial, staged.metadata, [results for results, _ in parts])
        (partial / "state.json").write_text(state)
        files = {name: found for _, part in parts for name, found in part.items()}
        _write_manifest(partial, files)
        if final.exists():
            self._delete(final)
        partial.rename(final)
        _sync(self.folder)

    def _record(self, path: Path) -> tuple[list[Any], dict[str, Any]]:
        """Record that another rank left of its written file; waits for it, at most `_GRACE_S` when the run is
        ending."""
        end = math.inf
        while not path.exists():
            if self._is_closing.is_set():
                end = min(end, time.monotonic() + _GRACE_S)
            if self._is_abandoned.is_set() or time.monotonic() > end:
                raise CheckpointError(f"{path.name}: another rank did not write its part of a checkpoint")
            time.sleep(_POLL_S)
        return cast("tuple[list[Any], dict[str, Any]]", read_plain(path))

    def prune(self, newest: int) -> None:
        """Delete checkpoints that are not to be kept. Those after step `newest` are ignored: damaged, or left by an
        earlier attempt."""
        paths = [path for path in self.paths() if step_of(path) <= newest]
        keep = set(paths[-self.keep_last :])
        rated = [(loss, path) for path in paths if (loss := _eval_loss(path)) is not None]
        if rated:
            keep.add(min(rated)[1])
        if self.keep_every is not None:
            keep |= {path for path in paths if step_of(path) % self.keep_every == 0}
        for path in paths:
            if path not in keep:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        """Hide, then delete: a killed process leaves no visible folder with missing files."""
        hidden = path.with_name(_DELETED + path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def step_of(path: Path) -> int:
    """Step in the name of a checkpoint."""
    return int(path.name.removeprefix(_PREFIX))


def list_checkpoints(folder: Path) -> list[Path]:
    """Visible checkpoints in a folder, oldest first, damaged ones included; other names are ignored."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())


def newest_good(folder: Path, ranks: Ranks | None = None) -> Path | None:
    """The newest checkpoint that is not damaged; warns of each damaged one that is newer.

    Args:
        ranks: ranks that share the reading; every one must call, and rank 0 warns. None: this process alone.

    Returns:
        Path of the checkpoint; None if there is no checkpoint at all.
    """
    ranks = Ranks() if ranks is None else ranks
    paths = ranks.on_rank0(lambda: list_checkpoints(folder))
    for path in reversed(paths):
        share = (ranks.position, ranks.size)
        problems = ranks.gather(ranks.on_all(partial(find_damage, path, share=share)))
        problem = next(filter(None, problems), None)
        if problem is None:
            return path
        if not ranks.is_leader:
            continue
        _log.warning("checkpoint %s is damaged (%s); using the one before", path, problem)
    if paths:
        kind = CheckpointError if ranks.is_leader else PeerError
        raise kind(
            f"{folder}: all {len(paths)} checkpoints are damaged; restore one from a copy, or train anew in another "
            f"{named('train.run_dir')}"
        )
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint, from its state.json."""
    try:
        state = parse_json((path / "state.json").read_bytes())
        version = state["format_version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path / 'state.json'}: is unreadable; choose another checkpoint") from None
    check_version(path, version)
    return cast("dict[str, Any]", state)


def _eval_loss(path: Path) -> float | None:
    try:
        loss = read_state(path)["eval_loss"]
    except (CheckpointError, KeyError):
        return None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _described(error: BaseException | None) -> tuple[Any, ...] | None:
    """An error as plain values, which can be pickled."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", error.errno, error.strerror, str(error.filename or "") or None
    return type(error).__name__, str(error)


def _write_manifest(folder: Path, files: Mapping[str, Any]) -> None:
    """Write the manifest of all files, flushing those that are not on disk yet. `folder`: folder of the checkpoint."""
    found = {}
    for path in _files(folder):
        if path.name.startswith(_RECORD):
            path.unlink()
            continue
        name = path.relative_to(folder).as_posix()
        found[name] = files[name] if name in files else _flushed(path)
    _sync(write_manifest(folder, found))
    _sync(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _flushed(path: Path) -> dict[str, Any]:
    """Flush a file to disk and return its size and checksums."""
    _sync(path)
    return described(path)


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
