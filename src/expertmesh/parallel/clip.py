"""Gradient clipping for parameters on several meshes, which `torch.nn.utils.clip_grad_norm_` refuses."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.experts.owned import OwnedParameter


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; every rank must call.

    Each rank sums the squares of its shards. These sums are all-reduced over the mesh axes along which parameters are
    cut, not over replicated axes: once per set of axes and device (some gradients may be in host memory).

    Args:
        parameters: plain ones that are equal on all ranks, DTensors on any mesh, and `OwnedParameter`s.
        max_norm: above 0.

    Returns:
        The norm before clipping, a scalar equal on all ranks. Does not synchronize with the device, unless some
        gradients are in host memory.
    """
    squares: dict[tuple[torch.device, tuple[dist.ProcessGroup, ...]], list[Tensor]] = {}
    local = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None and isinstance(parameter, OwnedParameter):
            gradient = parameter.new_zeros(())  # other owners may have one
        if gradient is None:
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups = _cut_along(parameter, gradient)
        local.append(part)
        exact = accumulate_dtype(part.dtype)
        square = torch.linalg.vector_norm(part, dtype=exact).square()
        squares.setdefault((part.device, groups), []).append(square)
    if not local:
        return torch.zeros(())
    totals = []
    for (_, groups), values in squares.items():
        total = torch.stack(values).sum()
        for group in groups:
            dist.all_reduce(total, group=group)
        totals.append(total)
    wide = max((t.dtype for t in totals), key=lambda dtype: torch.finfo(dtype).bits)
    device = next((t.device for t in totals if t.device.type != "cpu"), totals[0].device)
    norm = torch.stack([t.to(device, wide) for t in totals]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in local:
        part.mul_(factor.to(part))
    return norm


def _cut_along(parameter: nn.Parameter, gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if isinstance(parameter, OwnedParameter):
        group = parameter.owners.process_group
        return () if group is None else (group,)
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
