"""`TensorSource`, the protocol of stored tensors: names, types, shapes, and any part of a tensor read into given
memory.

Checkpoints of runs (`dcp.py`) and folders of the hub (`hub/load_pretrained.py`) are sources. `read_into` fills a model
from a source,
 whole or spread over ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh.checkpoints.box import Box, whole_box
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.parallel.huge_pages import say_huge_pages


class Stored(NamedTuple):
    """Shape and type of a tensor of a source.

    Attributes:
        shape: shape of the whole tensor.
        dtype: type in which the source gives it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSource(Protocol):
    """Tensors on disk, by name."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Shapes and types of the tensors, by name."""

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy a part of a tensor.

        Args:
            box: the part, within the whole tensor.
            into: the tensor to fill, of the shape of the part, any type, on any device.
        """


def read_into(source: TensorSource, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors from a source in place, each rank its own shards, without further memory or communication.

    Args:
        source: the source, which may have more tensors.
        targets: tensors by name, plain or DTensors; their global shapes must equal the source's.

    Raises:
        CheckpointError: the source lacks a tensor, or has it in another shape; nothing is read then. Or its files are
            damaged.
    """
    for name, tensor in targets.items():
        stored = source.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{source.path}: has no tensor {name}; it is of another model")
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{source.path}: {name} has shape {stored.shape}, the model's is {tuple(tensor.shape)}; it is of "
                "another model"
            )
    with torch.no_grad():
        for name, tensor in targets.items():
            for part, box in local_parts(tensor.detach()):
                source.read(name, box, part)
    on_cpu = (part for t in targets.values() for part, _ in local_parts(t.detach()) if part.is_cpu)
    say_huge_pages(sum(part.nbytes for part in on_cpu))


def read_whole(source: TensorSource, name: str) -> Tensor:
    """A whole tensor of a source, on the CPU."""
    shape, dtype = source.tensors[name]
    tensor = torch.empty(shape, dtype=dtype)
    source.read(name, whole_box(shape), tensor)
    return tensor


def check_range(given: Tensor, found: Tensor, what: str) -> None:
    """Refuse finite numbers that FP16 made infinite, the only type of ours with a smaller range."""
    if found.dtype is torch.float16 and given.dtype is not torch.float16:
        lost = found.isinf() & given.to(found.device).isfinite()
        if lost.any():
            rule = f"cannot hold {what}, which has numbers above 65,504"
            raise ConfigError("dtype", "float16", rule, "use bfloat16 or float32")


def local_parts(tensor: Tensor) -> list[tuple[Tensor, Box]]:
    """Local shards of a tensor on this rank, each with its box in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return [(tensor, whole_box(tensor.shape))]
    local: Any = tensor.to_local()
    if not local.numel():
        return []
    (chunk,) = tensor.__create_chunk_list__()
    at = zip(chunk.offsets, chunk.sizes, strict=True)
    return [(local, tuple(slice(start, start + size) for start, size in at))]
