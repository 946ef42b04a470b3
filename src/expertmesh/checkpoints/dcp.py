"""The tensors of a checkpoint: each rank writes what it alone has, and reads what it needs, by torch.distributed.checkpoint.

Planner and writer of torch are used directly: its `save` would run collectives in the background, hide an OSError, and warn
where there is no process group. What they write is read through memory maps.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from expertmesh.checkpoints.dcp_files import copy_piece
from expertmesh.checkpoints.dcp_index import read_index
from expertmesh.errors import CheckpointError
from expertmesh.parallel.ranks import Ranks

Make = Callable[[str], Tensor]
"""Gives a tensor by its name, on the CPU and in memory of its own."""


@dataclass(frozen=True)
class Staged:
    """What one rank writes.

    Attributes:
        plan: the pieces of tensors that this rank writes; no other rank writes them.
        pieces: their values on the CPU; on the meta device those that are made when they are written.
        metadata: where every piece of every rank belongs.
        make: gives these.
    """

    plan: SavePlan
    pieces: dict[MetadataIndex, Tensor]
    metadata: Metadata
    make: Make | None = None

    @property
    def num_bytes(self) -> int:
        """Of the pieces."""
        return sum(piece.nbytes for piece in self.pieces.values())


class Stager:
    """Copies to the CPU what this rank has to write of the tensors of a model spread over ranks.

    Pieces that several ranks have (copies of shards, plain tensors) are dealt out so that all write about as much. Who writes what is settled
    once and kept until names, shapes or layout change; so are the copies.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._local: SavePlan | None = None
        self._plan, self._metadata = SavePlan([]), Metadata({})
        self._pieces: dict[MetadataIndex, Tensor] = {}

    def stage(self, tensors: Mapping[str, Tensor], make: Make | None = None) -> Staged:
        """Copy; every rank must call with the same names.

        Args:
            tensors: by name, on any device: DTensors, and plain ones that are equal on all ranks.
            make: gives those on the meta device, plain and whole, one at a time when they are written.
        """
        local = _local_plan(tensors)
        if self.ranks.any(local != self._local):
            self._settle(local)
        pieces = {}
        for item in self._plan.items:
            tensor = tensors[item.index.fqn].detach()
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            pieces[item.index] = (
                part if part.is_meta else _copied(part, self._pieces.get(item.index))
            )
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
    """Hands the writer pieces that are on the CPU already, or makes them."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged
        self._made: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        piece, make = self._staged.pieces[write_item.index], self._staged.make
        if make is None or not piece.is_meta:
            return piece
        if self._made is not None:
            # The writer asks when the one before is in the file, but holds them all until that is closed.
            self._made.untyped_storage().resize_(0)
        self._made = make(write_item.index.fqn)
        return self._made


def write_tensors(folder: Path, staged: Staged) -> list[WriteResult]:
    """Write this rank's pieces into one file; returns where they are in it. Communicates with nobody.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    # nothing is copied ahead: pieces are on the CPU, or are made one at a time
    writer = FileSystemWriter(
        folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0
    )
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
    """Write the file that says where each piece is.

    Args:
        folder: the checkpoint.
        metadata: of `Staged`.
        results: of `write_tensors`, of all ranks.
    """
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(copy.copy(metadata), results)


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill given tensors from a checkpoint, in place; tensors of the checkpoint that are not asked for are left out.

    Copies the saved pieces that overlap with what this rank has of the tensors, however many ranks saved them, out of mapped
    files, so that a rank needs no memory beside its tensors. Communicates with nobody.

    Args:
        folder: the checkpoint.
        tensors: by name, plain or DTensors; their (whole) shapes must be those of the checkpoint.

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
    planner, metadata = DefaultLoadPlanner(), read_index(folder)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    with torch.no_grad():
        _read(folder, metadata, planner.finish_plan(planner.create_local_plan()), planner)


def _read(folder: Path, metadata: Metadata, plan: LoadPlan, planner: DefaultLoadPlanner) -> None:
    """Copy the pieces of a plan out of the mapped files."""
    for item in plan.items:
        entry = metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        place = metadata.storage_data.get(item.storage_index)
        offset = item.storage_index.offset
        sizes = next((c.sizes for c in entry.chunks if offset in (None, c.offsets)), None)
        if place is None or sizes is None:
            raise CheckpointError(
                f"{folder}: the index does not say where {item.storage_index.fqn} is; choose another checkpoint"
            )
        target = planner.resolve_tensor(item).detach()
        where = zip(item.storage_offsets, item.lengths, strict=True)
        copy_piece(
            target,
            folder / place.relative_path,
            tuple(slice(start, start + length) for start, length in where),
            offset=place.offset,
            length=place.length,
            dtype=entry.properties.dtype,
            sizes=sizes,
        )
        planner.commit_tensor(item, target)


def whole_tensors(folder: Path, names: Iterable[str]) -> Iterator[Tensor]:
    """Tensors of a checkpoint one after the other, whole, on the CPU; holds one at a time.

    Args:
        folder: the checkpoint.
        names: of tensors that it has.
    """
    metadata = read_index(folder)
    for name in names:
        yield _whole_tensor(folder, metadata, name)


def _whole_tensor(folder: Path, metadata: Metadata, name: str) -> Tensor:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({name: tensor}, metadata, is_coordinator=True)
    _read(folder, metadata, planner.finish_plan(planner.create_local_plan()), planner)
    return tensor


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of all tensors of a checkpoint.

    Raises:
        CheckpointError: unreadable.
    """
    return {name: tuple(entry.size) for name, entry in _entries(folder).items()}


def tensor_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Names and dtypes of all tensors of a checkpoint.

    Raises:
        CheckpointError: unreadable.
    """
    return {name: entry.properties.dtype for name, entry in _entries(folder).items()}


def _entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    found = read_index(folder).state_dict_metadata
    return {name: e for name, e in found.items() if isinstance(e, TensorStorageMetadata)}
