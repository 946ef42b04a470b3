"""Functions of whole matrices (Muon) on parameters that are sharded over ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def on_whole_matrices(function: Callable[[Tensor], Tensor], part: Tensor, *, parameter: Tensor) -> Tensor:
    """Apply a function of matrices to a tensor that has the DTensor layout of a parameter.

    Axes before the last two count matrices (experts, branches): cuts along them stay, so experts that are whole on
    their rank move no data. A tensor that is cut along one of the last two axes is gathered, computed on each of these
    ranks, and cut again; every rank that has a shard must then call.

    Args:
        function: (..., A, B) -> (..., A, B), each matrix on its own.
        part: this rank's shard.

    Returns:
        This rank's shard of the function's result.
    """
    if not isinstance(parameter, DTensor):
        return function(part)
    mesh, cut = parameter.device_mesh, parameter.placements
    axes = (parameter.ndim - 2, parameter.ndim - 1)
    # `is_shard` is False for the _StridedShard placement of an axis that tensor parallelism cut before FSDP2
    whole = [Replicate() if getattr(p, "dim", None) in axes else p for p in cut]
    if whole == list(cut):
        return function(part)
    shape: dict[str, Any] = {
        "shape": parameter.shape,
        "stride": parameter.stride(),
        "run_check": False,
    }
    gathered = DTensor.from_local(part, mesh, cut, **shape).redistribute(placements=whole)
    result = DTensor.from_local(function(gathered.to_local()), mesh, whole, **shape)
    local: Tensor = result.redistribute(placements=cut).to_local()
    return local


def own_part(tensor: Tensor) -> Tensor:
    """Local shard of a parameter, its gradient or a moment, sharing memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor._local_tensor
    return local
