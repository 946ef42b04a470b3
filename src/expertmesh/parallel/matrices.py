"""Whole matrices of parameters that are cut over ranks, for optimisers that must see a matrix as one."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def on_whole_matrices(
    function: Callable[[Tensor], Tensor], part: Tensor, *, parameter: Tensor
) -> Tensor:
    """Apply a function of matrices to a tensor that is laid out over ranks as a parameter is.

    Axes before the last two count matrices (experts, branches): what is cut along them stays where it is, so experts that are
    whole on their rank move nothing. What is cut along one of the last two axes is gathered, computed on each of these ranks, and cut
    again; then every rank that has a part of the parameter must call.

    Args:
        function: (..., A, B) -> (..., A, B), one matrix by itself.
        part: this rank's part.
        parameter: a plain one, or a DTensor whose layout the part has.

    Returns:
        This rank's part of the function's result.
    """
    if not isinstance(parameter, DTensor):
        return function(part)
    mesh, cut = parameter.device_mesh, parameter.placements
    axes = (parameter.ndim - 2, parameter.ndim - 1)
    # `is_shard` is false of the strided parts that FSDP2 makes of an axis which tensor parallelism has cut before
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
    """This rank's part of a parameter, its gradient or a moment of it, sharing memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor._local_tensor
    return local
