"""Where a rank's part of a parameter lies in the whole, and what is laid out over ranks as the parameter is."""

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
    """Where a part lies in a whole tensor.

    Attributes:
        shape: of the whole.
        offsets: first index of the part along each axis.
        sizes: of the part.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The part, a slice per axis."""
        ends = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in ends)


def place_of(parameter: Tensor) -> Place:
    """Where this rank's part of a parameter lies; of a plain one, all of it."""
    shape = tuple(parameter.shape)
    sizes = tuple(own_part(parameter).shape)
    chunks: Any = ()
    if isinstance(parameter, DTensor) and own_part(parameter).numel():
        chunks = parameter.__create_chunk_list__()
    offsets = tuple(chunks[0].offsets) if chunks else (0,) * len(shape)
    return Place(shape, offsets, sizes)


def laid_out_as(parameter: Tensor, part: Tensor, *, last: int) -> Tensor:
    """A rank's part as a tensor that lies over the ranks as a parameter does.

    Args:
        parameter: a plain one or a DTensor.
        part: sizes are those of the parameter's part, but for the last axis.
        last: length of the whole last axis.

    Returns:
        The part itself for a plain parameter, else a DTensor that shares its memory.
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
    """The largest of a number of each rank for each parameter, over the ranks that hold parts of it; all of them must call.

    One collective for all parameters of a mesh and each of its axes.

    Args:
        parameters: plain ones, of which the number is this rank's, or DTensors.
        values: scalars, one of each.
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
