"""Low-rank adapters of spread experts: each rank has the factors of the experts that it computes.

Where tokens travel to all ranks, factors are cut as their experts are, along E and, of the factor that has F, along F.
A factor without F is on all slices of its experts, an adapter that all experts share on all ranks: their gradients are
summed over the ranks that have the same part. Where weights are gathered, every rank has all factors, which are small,
and uses its experts' factors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from expertmesh.comm.collectives import all_reduce
from expertmesh.comm.group import RankGroup
from expertmesh.comm.mesh import expert_mesh
from expertmesh.comm.world import World
from expertmesh.moe.module_adapters import Adapter, ModuleAdapters
from expertmesh.parallel.experts.gather import SLICED_AXIS
from expertmesh.parallel.experts.route_split import RouteSplit


def shard_adapters(adapters: ModuleAdapters, world: World, split: RouteSplit, *, layer: str, sums: bool = True) -> None:
    """Spread the adapters of a layer's experts, in place; every rank must call.

    Args:
        adapters: with whole factors, or on the meta device.
        split: how the ranks hold the experts and compute them.
        sums: whether gradients are summed over ranks with the same part of a factor.
    """
    degrees = split.storage
    mesh, rank = expert_mesh(world, degrees), world.position % degrees.num_ranks
    i, j = degrees.coordinates(rank)
    is_cut = split.route_degree == degrees.num_ranks
    for name, adapter in adapters.named_children():
        assert isinstance(adapter, Adapter)
        sliced, axis_f = adapter.cut(SLICED_AXIS[name])
        locals_of: dict[str, Callable[[], Tensor]] = {}
        for factor in ("a", "b"):
            whole, cuts = getattr(adapter, factor), dict[str, int]()
            if not adapter.shared:
                cuts["e"] = 0
            if factor == sliced:
                cuts["f"] = axis_f
            part, parts = whole.detach(), {"e": (i, degrees.e), "f": (j, degrees.f)}
            for axis, at in cuts.items() if is_cut else ():
                part = _narrowed(part, at, *parts[axis])
            placements = {axis: Shard(at) for axis, at in cuts.items() if is_cut}
            shard = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                mesh,
                _placements(mesh, placements),
                run_check=False,
            )
            setattr(adapter, factor, nn.Parameter(shard, requires_grad=whole.requires_grad))
            group = _holders(world, split, cuts if is_cut else {}) if sums else None
            blocks = {"e": (split.block(rank)[0], split.route_e)}
            blocks["f"] = split.block(rank)[1], split.route_f
            own = [] if is_cut else [(at, *blocks[axis]) for axis, at in cuts.items()]
            locals_of[factor] = partial(_local, adapter, factor, group, own, f"{layer}, adapters")
        adapter.local = partial(_called, locals_of)


def _called(functions: dict[str, Callable[[], Tensor]], name: str) -> Tensor:
    return functions[name]()


def _narrowed(t: Tensor, axis: int, index: int, count: int) -> Tensor:
    size = t.shape[axis] // count
    return t.narrow(axis, index * size, size)


def _placements(mesh: DeviceMesh, cut: dict[str, Shard]) -> list[Placement]:
    return [cut.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]


def _holders(world: World, split: RouteSplit, cut: dict[str, int]) -> RankGroup:
    """Ranks that have the same part of a factor that is cut along some axes of the mesh."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for position in range(world.size):
        i, j = split.storage.coordinates(position % split.storage.num_ranks)
        key = tuple(at for axis, at in (("e", i), ("f", j)) if axis in cut)
        cells.setdefault(key, []).append(position)
    return world.group(list(cells.values()), name="ranks with the same adapters")


def _local(
    adapter: Adapter,
    factor: str,
    group: RankGroup | None,
    own: list[tuple[int, int, int]],
    where: str,
) -> Tensor:
    """Part of a factor on this rank, differentiable."""
    found: Tensor = getattr(adapter, factor)
    if isinstance(found, DTensor):
        found = found.to_local()
    if group is not None and group.size > 1:
        found = _SummedGradient.apply(found, group, where)
    for axis, index, count in own:
        found = _narrowed(found, axis, index, count)
    return found


class _SummedGradient(torch.autograd.Function):
    """The tensor itself; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup, where: str) -> Tensor:
        ctx.group, ctx.where = group, where
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(grad, ctx.group, where=f"{ctx.where}, backward"), None, None
