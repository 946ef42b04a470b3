"""Tensors of a checkpoint in the format of torch.distributed.checkpoint: each rank writes its shards and reads the
parts it needs.

Planner and writer of torch are used directly: its `save` would run collectives in the background, hide an OSError, and
warn where there is no process group. Files are read through memory maps.
"""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from expertmesh.checkpoints.box import Box, overlap
from expertmesh.checkpoints.dcp_files import copy_piece
from expertmesh.checkpoints.dcp_index import read_index
from expertmesh.checkpoints.source import Stored
from expertmesh.errors import CheckpointError
from expertmesh.parallel.ranks import Ranks

Make = Callable[[str], Tensor]
"""Function from a tensor's name to the tensor, on the CPU and in memory of its own."""


@dataclass(frozen=True)
class Staged:
    """Pieces of tensors that one rank writes."""

    plan: SavePlan  # the pieces of tensors that this rank writes; no other rank writes them
    # their values on the CPU; a piece on the meta device is made by `make` when it is written
    pieces: dict[MetadataIndex, Tensor]
    metadata: Metadata  # positions of all ranks' pieces in their tensors
    make: Make | None = None  # makes the pieces on the meta device

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self.pieces.values())


class Stager:
    """Copies to the CPU the pieces that this rank writes of a model spread over ranks.

    Pieces that several ranks have (copies of shards, plain tensors) are dealt out so that all ranks write about as many
    bytes. Plan and copies are kept until names, shapes or layout change.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._local: SavePlan | None = None
        self._plan, self._metadata = SavePlan([]), Metadata({})
        self._pieces: dict[MetadataIndex, Tensor] = {}

    def stage(self, tensors: Mapping[str, Tensor], make: Make | None = None) -> Staged:
        """Copy this rank's pieces; every rank must call with the same names.

        Args:
            tensors: by name, on any device: DTensors, and plain ones that are equal on all ranks.
            make: makes the tensors on the meta device, plain and whole, one at a time when they are written.
        """
        local = _local_plan(tensors)
        if self.ranks.any(local != self._local):
            self._settle(local)
        pieces = {}
        for item in self._plan.items:
            tensor = tensors[item.index.fqn].detach()
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            pieces[item.index] = part if part.is_meta else _copied(part, self._pieces.get(item.index))
        self._pieces = pieces
        return Staged(self._plan, pieces, self._metadata, make)

    def _settle(self, local: SavePlan) -> None:
        plans, metadata = DefaultSavePlanner().create_global_plan(self.ranks.gather(local))
        self._local, self._metadata = local, metadata
        # The writer names a rank's file by the place of its plan.
        named = FileSystemWriter("").prepare_global_plan(plans)
        self._plan = named[self.ranks.position]


def _local_plan(tensors: Mapping[str, Tensor]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    plan = planner.create_local_plan()
    # A rank beyond the end of a small tensor has an empty shard.
    items = [item for item in plan.items if item.tensor_storage_size() or not _size(item)]
    return replace(plan, items=items)


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.size.numel()


def _copied(source: Tensor, target: Tensor | None) -> Tensor:
    if target is None or target.shape != source.shape or target.dtype != source.dtype:
        return source.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return target.copy_(source)


class _StagedPlanner(DefaultSavePlanner):
    """Planner that gives the writer the staged pieces, or makes them."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged
        self._made: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece, make = self._staged.pieces[write_item.index], self._staged.make
        if make is None or not piece.is_meta:
            return piece
        if self._made is not None:
            # The writer asks for a piece when the one before is in the file, but holds all pieces until the file is
            # closed.
            self._made.untyped_storage().resize_(0)
        self._made = make(write_item.index.fqn)
        return self._made


def write_tensors(folder: Path, staged: Staged) -> list[WriteResult]:
    """Write this rank's pieces into one file, without communication; returns their places in it."""
    # no copies ahead: pieces are on the CPU, or are made one at a time
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    try:
        return writer.write_data(staged.plan, _StagedPlanner(staged)).wait()
    except RuntimeError as error:
        # torch's archive hides the error of the disk behind one of its own.
        raise _hidden_error(error, folder) from error


def _hidden_error(error: BaseException, folder: Path) -> BaseException:
    """The OSError that another error came from; the error itself if there is none."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno is not None:
            return OSError(found.errno, os.strerror(found.errno), found.filename or str(folder))
        found = found.__cause__ or found.__context__
    return error


def write_index(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Write the index, the file with the place of each piece."""
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(copy.copy(metadata), results)


class Checkpoint:
    """The tensors of a checkpoint, however many ranks saved them; a `TensorSource`. The index is read once.

    Args:
        prefix: prefix of the tensors to read, removed from their names: "model." for the weights of a model.
    """

    def __init__(self, path: Path, *, prefix: str = "") -> None:
        self.path = path
        index = read_index(path)
        self._entries = {
            name.removeprefix(prefix): (name, entry)
            for name, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
        }
        self._places = index.storage_data
        self.tensors = {
            name: Stored(tuple(entry.size), entry.properties.dtype) for name, (_, entry) in self._entries.items()
        }

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part out of the mapped files of all pieces that overlap with it; see `TensorSource.read`."""
        full_name, entry = self._entries[name]
        covered = 0
        for chunk in entry.chunks:
            if len(chunk.offsets) != len(box) or len(chunk.sizes) != len(box):
                break
            bounds = zip(chunk.offsets, chunk.sizes, strict=True)
            shared = overlap(box, tuple(slice(start, start + size) for start, size in bounds))
            if shared is None:
                continue
            ours, theirs = shared
            place = self._places.get(MetadataIndex(full_name, chunk.offsets))
            if place is None:
                break
            target = into[ours]
            covered += target.numel()
            copy_piece(
                target,
                self.path / place.relative_path,
                theirs,
                offset=place.offset,
                length=place.length,
                dtype=entry.properties.dtype,
                sizes=chunk.sizes,
            )
        if covered != into.numel():
            raise CheckpointError(
                f"{self.path}: the index does not say where {full_name} is; choose another checkpoint"
            )
