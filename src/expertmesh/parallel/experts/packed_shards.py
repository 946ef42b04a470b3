"""Storage of a layer's packed experts, which rest under adapters: each rank holds the codes and scales of its part."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from expertmesh.comm.collectives import start_all_gather
from expertmesh.comm.group import wait
from expertmesh.comm.mesh import ExpertDegrees, divisors, expert_mesh
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError, named
from expertmesh.moe.experts import ExpertParameters, GroupedExperts
from expertmesh.ops.experts.weights import FORMATS, ExpertWeights
from expertmesh.parallel.experts.adapter_shards import shard_adapters
from expertmesh.parallel.experts.gather import SLICED_AXIS, Layout
from expertmesh.parallel.experts.replicated_experts import ReplicatedWeights
from expertmesh.parallel.experts.route_split import RouteSplit, make_split
from expertmesh.parallel.experts.storage import ExpertShards, placements, to_local

PACKED_STAY = "packed experts"
"""Value of `ExpertShards.stay` for packed experts."""
_AXES = {**SLICED_AXIS, "w_in_scale": 2, "w_out_scale": 2}
"""Axis of each tensor that the f slices cut; one that has a single scale there is on all ranks of its experts."""


def check_packed(experts: GroupedExperts, degrees: ExpertDegrees, *, offload: bool, layer: str) -> None:
    """Check that packed experts can be sharded."""
    _, _, F, _ = experts.shape
    unit = FORMATS[experts.format].unit(experts.weights().slices()[0])
    if degrees.f > 1 and F // degrees.f % unit:
        fits = [f for f in divisors(F) if f == 1 or F // f % unit == 0]
        raise ConfigError(
            f"{layer}: {named('parallel.es_degree', degrees.f)} cuts {F} hidden columns of {experts.format} into "
            f"{F // degrees.f},"
            f" which are no whole groups of {unit}; the degrees that fit are {', '.join(map(str, fits))}"
        )
    if offload:
        raise ConfigError(f"{layer}: offload=True with {PACKED_STAY}, which stay on the device; leave it out")


class PackedGather:
    """Gather of the packed tensors of a layer, under way; they rest, so its backward does nothing.

    Args:
        shards: this rank's tensors by name.
        axes: axis of each tensor that is cut into f slices.
    """

    def __init__(self, shards: dict[str, Tensor], axes: dict[str, int], layout: Layout, *, where: str) -> None:
        self._axes, self._layout = axes, layout
        self._dtypes = {name: one.dtype for name, one in shards.items()}
        self._started = {
            # collectives do not know all types of codes
            name: start_all_gather(one.view(torch.uint8), layout.group, where=where)
            for name, one in shards.items()
        }

    def joined(self) -> dict[str, tuple[Tensor]]:
        """Tensors of one slice for the operators, which the backends of adapters need; waits for the collectives."""
        found = {}
        for name, (shards, pending) in self._started.items():
            wait(pending)
            first, *others = self._layout.slices(name, shards)
            if others and name in self._axes:
                first = torch.cat([first, *others], self._axes[name])
            found[name] = (first.view(self._dtypes[name]),)
        return found

    def late(self, parameters: ExpertParameters) -> ExpertParameters:
        """The given parameters: packed experts have no gradient that could wait."""
        return parameters

    def announce_backward(self, y_TD: Tensor) -> None:
        """Do nothing."""


class PackedShards(ExpertShards):
    """Shards the tensors of packed experts, and gathers them, as they are, for a `RouteSplit`."""

    casts_tokens = True
    stay = PACKED_STAY

    def __init__(
        self,
        experts: GroupedExperts,  # their tensors are replaced by shards; on the meta device nothing is allocated
        world: World,  # all ranks; every one must construct it
        degrees: ExpertDegrees,  # how the W ranks of one replica hold the experts
        *,
        layer: str,  # name for errors and the byte counter
        plain: bool = False,  # see `ExpertShards`
        route_degree: int | None = None,  # see `RouteSplit`; adapters of experts serve no other
    ) -> None:
        super().__init__(world, degrees, layer=layer, plain=plain)
        check_packed(experts, degrees, offload=False, layer=layer)
        self.experts, self._axes = experts, dict[str, int]()
        mesh, (i, j) = expert_mesh(world, degrees), degrees.coordinates(self.rank)
        tensors: dict[str, Tensor] = {}
        for name, axis in _AXES.items():
            full = getattr(experts, name)
            if full is None:
                continue
            part, f = full.detach().chunk(degrees.e)[i], cast(Placement, Replicate())
            if full.shape[axis] > 1:
                self._axes[name], f = axis, Shard(axis)
                part = part.chunk(degrees.f, axis)[j]
            part, places = (
                part.clone(memory_format=torch.contiguous_format),
                placements(mesh, e=Shard(0), f=f),
            )
            if not plain:
                part = DTensor.from_local(part, mesh, places, run_check=False)
            tensors[name] = part
        experts.hold(experts.format, tensors)
        if experts.adapters is not None:
            split = make_split(degrees, route_degree)
            shard_adapters(experts.adapters, world, split, layer=layer, sums=not plain)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the experts rest."""

    def start_gather(self, split: RouteSplit, dtype: torch.dtype | None) -> PackedGather:
        """Start to gather codes and scales in their own types."""
        found = {name: getattr(self.experts, name) for name in _AXES}
        shards = {name: to_local(one) for name, one in found.items() if one is not None}
        return PackedGather(shards, self._axes, self.layout(split), where=f"{self.layer}, codes")

    def finish_gather(self, use: PackedGather, *, num_calls: int = 1) -> ExpertParameters:
        """Wait for a gather; returns the packed experts that this rank computes."""
        own = self.experts
        return ExpertParameters(ExpertWeights.of_names(use.joined(), own.activation, own.format))

    def replicate(self, hot: Sequence[int], dtype: torch.dtype | None) -> ReplicatedWeights:
        """Never called: packed experts stay on their ranks."""
        raise AssertionError("they stay")
