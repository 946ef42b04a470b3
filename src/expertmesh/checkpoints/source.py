"""Where tensors come from: names, types and shapes, and any part of one, read into memory that is there already.

Checkpoints of runs (`dcp.py`) and folders of the hub (`hub/load_pretrained.py`) are sources; so may be other formats. Whoever fills a model,
whole or spread over ranks, does it by `read_into`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh.checkpoints.box import Box, whole_box
from expertmesh.errors import CheckpointError


class Stored(NamedTuple):
    """What a source has under a name.

    Attributes:
        shape: of the whole tensor.
        dtype: its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(Protocol):
    """Tensors on disk."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What there is, by name."""

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part of a tensor.

        Args:
            name: of the tensor.
            box: the part, within the whole tensor.
            into: gets it; of the shape of the part, any type, on any device.

        Raises:
            CheckpointError: the files do not hold it.
        """


def read_into(source: TensorSource, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors from a source, in place, each rank what it has of them; needs no memory beside them, and communicates with nobody.

    Args:
        source: may have more tensors.
        targets: by name, plain or DTensors; their whole shapes must be those of the source.

    Raises:
        CheckpointError: the source lacks one, or has it in another shape; nothing is read then. Or its files are damaged.
    """
    for name, tensor in targets.items():
        stored = source.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{source.path}: has no tensor {name}; it is of another model")
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{source.path}: {name} has shape {stored.shape}, the model's is {tuple(tensor.shape)}; it is of another model"
            )
    with torch.no_grad():
        for name, tensor in targets.items():
            for part, box in _local_parts(tensor.detach()):
                source.read(name, box, part)


def read_whole(source: TensorSource, name: str) -> Tensor:
    """One tensor of a source, whole, on the CPU."""
    shape, dtype = source.tensors[name]
    tensor = torch.empty(shape, dtype=dtype)
    source.read(name, whole_box(shape), tensor)
    return tensor


def _local_parts(tensor: Tensor) -> list[tuple[Tensor, Box]]:
    """What this rank holds of a tensor, and where that lies in the whole."""
    if not isinstance(tensor, DTensor):
        return [(tensor, whole_box(tensor.shape))]
    local: Any = tensor.to_local()
    if not local.numel():
        return []
    (chunk,) = tensor.__create_chunk_list__()
    at = zip(chunk.offsets, chunk.sizes, strict=True)
    return [(local, tuple(slice(start, start + size) for start, size in at))]
