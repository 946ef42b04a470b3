"""Offsets of a rank's shard in a whole parameter, and tensors with the same DTensor layout as a parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from expertmesh.parallel.matrices import own_part


@dataclass(frozen=True)
class Place:
    """Offsets and sizes of a shard in a whole tensor."""

    shape: tuple[int, ...]  # shape of the whole tensor
    offsets: tuple[int, ...]  # first index of the shard along each axis
    sizes: tuple[int, ...]  # shape of the shard

    @property
    def box(self) -> tuple[slice, ...]:
        """Slices of the shard, one per axis."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)


def place_of(parameter: Tensor) -> Place:
    """Place of this rank's shard of a parameter; for a plain tensor, the whole."""
    shape = tuple(parameter.shape)
    sizes = tuple(own_part(parameter).shape)
    chunks: Any = ()
    if isinstance(parameter, DTensor) and own_part(parameter).numel():
        chunks = parameter.__create_chunk_list__()
    offsets = tuple(chunks[0].offsets) if chunks else (0,) * len(shape)
    return Place(shape, offsets, sizes)


def laid_out_as(parameter: Tensor, part: Tensor, *, last: int) -> Tensor:
    """A rank's shard as a tensor with the DTensor layout of a parameter.

    Args:
        part: shard of the same sizes as the parameter's, except along the last axis.
        last: length of the whole last axis.

    Returns:
        `part` itself for a plain parameter, else a DTensor that shares its memory.
    """
    if not isinstance(parameter, DTensor):
        return part
    shape = torch.Size([*parameter.shape[:-1], last])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )


def maxima_over_ranks(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Largest value per parameter over the ranks that hold shards of it; all of these ranks must call.

    One collective per mesh axis covers all parameters of that mesh.

    Args:
        parameters: plain tensors, whose values are returned as they are, or DTensors.
    """
    found = list(values)
    for mesh in {p.device_mesh: None for p in parameters if isinstance(p, DTensor)}:
        mine = [i for i, p in enumerate(parameters) if getattr(p, "device_mesh", None) == mesh]
        together = torch.stack([found[i] for i in mine])
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.all_reduce(together, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        for i, value in zip(mine, together.unbind(), strict=True):
            found[i] = value
    return found
