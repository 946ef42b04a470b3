"""Storage of a layer's experts: every parameter is sharded e ways along E and f ways along F, and never moves.

Parameters keep their names (`experts.w_in`, ...) as DTensors over the mesh ("replica", "e", "f"), so optimizers,
checkpoints and norms know their layout. `start_gather` and `finish_gather` gather the weights that a split needs.
Gradients return by a reduce-scatter to the shards and an all-reduce over the replicas.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from expertmesh.comm.group import RankGroup
from expertmesh.comm.mesh import ExpertDegrees, expert_mesh
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import ExpertParameters, GroupedExperts
from expertmesh.parallel.experts.adapter_shards import shard_adapters
from expertmesh.parallel.experts.gather import (
    SLICED_AXIS,
    Gather,
    GatheredWeights,
    GradientBuffers,
    Layout,
    hand_over,
)
from expertmesh.parallel.experts.owned import OwnedParameter
from expertmesh.parallel.experts.prefetch import (
    GatheredTensors,
    GatherHandle,
    GatherKey,
    Prefetcher,
    in_backward,
)
from expertmesh.parallel.experts.replicated_experts import ReplicatedWeights
from expertmesh.parallel.experts.route_split import RouteSplit, make_split
from expertmesh.parallel.offload import HostMemory, host_mesh

Keep = Literal["until_step", "until_backward", "regather"]


def placements(mesh: DeviceMesh, *, e: Placement, f: Placement) -> list[Placement]:
    """Placements of a parameter on the axes of a mesh; replicated along "replica"."""
    found: dict[str, Placement] = {"replica": Replicate(), "e": e, "f": f}
    return [found[name] for name in mesh.mesh_dim_names or ()]


def to_local(parameter: Tensor) -> Tensor:
    """Shard of a parameter on this rank, differentiable."""
    if not isinstance(parameter, DTensor):  # plain
        return parameter
    local: Tensor = parameter.to_local()
    return local


class WeightsInUse(Protocol):
    """Weights of one layer in one forward, under one split."""

    def late(self, parameters: ExpertParameters) -> ExpertParameters:
        """Parameters for one call whose weight gradients are computed after the tokens' gradients are sent."""

    def announce_backward(self, y_TD: Tensor) -> None:
        """Register a hook on the experts' output that prepares for their backward."""


class ExpertShards(ABC):
    """Ranks that hold the experts of one layer.

    Args:
        world: all ranks; every one must construct it.
        degrees: how the W ranks of one replica hold the experts; there are world.size / W replicas.
        plain: parameters stay the objects that they are, with this rank's experts as plain tensors, and gradients are
            not summed over replicas: for an engine that has the parameters and sums their gradients itself.
    """

    casts_tokens: bool
    """Whether the experts compute in autocast's dtype for any input, so that tokens may be sent in it."""
    stay = ""
    """Reason why expert weights cannot be gathered; empty: they can."""

    def __init__(self, world: World, degrees: ExpertDegrees, *, layer: str, plain: bool = False) -> None:
        self.world, self.degrees, self.layer, self.plain = world, degrees, layer, plain
        W = degrees.num_ranks
        self.rank = world.position % W
        self.num_replicas = world.size // W
        cells = [[r + W * copy for copy in range(self.num_replicas)] for r in range(W)]
        if plain:
            cells = [[rank] for rank in range(world.size)]
        self.replicas: RankGroup = world.group(cells, name="copies of the experts")
        self.owners = self.group([list(range(W))], "the ranks that hold the experts")
        self._layouts: dict[RouteSplit, Layout] = {}

    def group(self, cells: list[list[int]], name: str) -> RankGroup:
        """Process group of this rank in a partition of the ranks of a replica, applied to all replicas; every rank must
        call."""
        W = self.degrees.num_ranks
        all_cells = [[W * copy + r for r in cell] for copy in range(self.num_replicas) for cell in cells]
        return self.world.group(all_cells, name=name)

    def layout(self, split: RouteSplit) -> Layout:
        """Layout of the gathered shards of a split; every rank must call when a split is first used."""
        if split not in self._layouts:
            self._layouts[split] = self._new_layout(split)
        return self._layouts[split]

    def _new_layout(self, split: RouteSplit) -> Layout:
        cells = split.gather_cells()
        members = next(cell for cell in cells if self.rank in cell)
        block_e, block_f = split.block(self.rank)
        first_e, first_f = block_e * split.gather_e, block_f * split.gather_f
        order = tuple(
            tuple(members.index(self.degrees.rank_of(first_e + i, first_f + j)) for i in range(split.gather_e))
            for j in range(split.gather_f)
        )
        group = self.group(cells, "the ranks that share weights")
        return Layout(group, order, first_f, self.degrees.f)

    @abstractmethod
    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Invalidate kept weights after each step of an optimizer."""

    @abstractmethod
    def start_gather(self, split: RouteSplit, dtype: torch.dtype | None) -> WeightsInUse | None:
        """Start to gather the weights that this rank computes with under a split; None: nothing to gather.

        Args:
            dtype: dtype of the gathered weights; None: the parameters' own.
        """

    @abstractmethod
    def finish_gather(self, use: Any, *, num_calls: int = 1) -> ExpertParameters:
        """Wait for a gather; returns the parameters of the experts that this rank computes, differentiable."""

    @abstractmethod
    def replicate(self, hot: Sequence[int], dtype: torch.dtype | None) -> ReplicatedWeights:
        """Start to bring the weights of hot experts to all ranks, in a dtype (None: the parameters' own)."""


ADAPTERS_STAY = "low-rank adapters"
"""Value of `ExpertShards.stay` for experts with adapters."""


def check_shards(
    experts: GroupedExperts,  # experts with their full parameters
    degrees: ExpertDegrees,  # see `ExpertStorage`
    *,
    offload: bool,  # whether shards rest in host memory
    layer: str,  # name for errors
) -> None:
    """Check that the parameters of grouped experts can be sharded, before any is."""
    for name, axis in SLICED_AXIS.items():
        full = getattr(experts, name)
        for cut, parts in ((0, degrees.e), (axis, degrees.f)):
            if full is not None and full.shape[cut] % parts:
                raise ConfigError(
                    f"{layer}: {name} of shape {tuple(full.shape)} cannot be cut into {parts} equal parts along "
                    f"axis {cut}; choose another es_degree, or sizes that it divides"
                )
    if experts.adapters is not None and offload:
        raise ConfigError(
            f"{layer}: offload=True with low-rank adapters, which stay on the device; leave one of them out"
        )


class ExpertStorage(ExpertShards):
    """Shards the parameters of grouped experts, and gathers them for a `RouteSplit`.

    The loss is the sum of the ranks' losses: gradients are sums over ranks, not means.

    Args:
        experts: their full parameters are replaced by shards; on the meta device nothing is allocated.
        keep: lifetime of gathered weights. "until_step": until a parameter changes, so that all micro-batches of a step
            share one gather (requires `follow`); "until_backward": until the backward of the forward that gathered
            them; "regather": until the experts have run, with a second gather in the backward.
        device: compute device if shards, gradients and optimizer state rest in host memory; None: they rest on the
            parameters' device.
    """

    casts_tokens = True

    def __init__(
        self,
        experts: GroupedExperts,
        world: World,  # all ranks; every one must construct the storage
        degrees: ExpertDegrees,  # how the W ranks of one replica hold the experts; there are world.size / W replicas
        *,
        keep: Keep = "until_backward",
        layer: str = "experts",  # name for errors and the byte counter
        prefetcher: Prefetcher | None = None,  # prefetcher of the model, for gathers one layer ahead; None: no prefetch
        device: torch.device | None = None,
        plain: bool = False,  # see `ExpertShards`
        route_degree: int | None = None,  # see `RouteSplit`; adapters of experts serve no other
    ) -> None:
        super().__init__(world, degrees, layer=layer, plain=plain)
        check_shards(
            experts,
            degrees,
            offload=device is not None,
            layer=layer,
        )
        self.experts, self.keep, self.activation = experts, keep, experts.activation
        self._prefetcher = prefetcher or Prefetcher()
        self.host = None if device is None else HostMemory(device)
        experts.compute_device = device
        self._buffers: dict[RouteSplit, GradientBuffers] = {}
        self._kept: dict[GatherKey, tuple[list[int], GatheredTensors]] = {}
        self.names = [name for name in SLICED_AXIS if getattr(experts, name) is not None]
        self._is_following = self._is_pinned = False
        self._shard_parameters()
        if experts.adapters is not None:
            self.stay = ADAPTERS_STAY
            split = make_split(degrees, route_degree)
            shard_adapters(experts.adapters, world, split, layer=layer, sums=not plain)
        if experts.main_grads is not None:
            experts.accumulate_main_grads()  # buffers of the shards

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop kept weights after each step of an optimizer; without this call "until_step" keeps none."""
        self._is_following = True
        optimizer.register_step_post_hook(lambda *_: self._kept.clear())

    def _shard_parameters(self) -> None:
        mesh = expert_mesh(self.world, self.degrees)
        if self.host is not None:
            mesh = host_mesh(mesh)
        i, j = self.degrees.coordinates(self.rank)
        for name in self.names:
            full, axis = getattr(self.experts, name), SLICED_AXIS[name]
            rows, columns = full.shape[0] // self.degrees.e, full.shape[axis] // self.degrees.f
            part = full.detach().narrow(0, i * rows, rows).narrow(axis, j * columns, columns)
            if self.plain:
                full.data = self._at_rest(part)
                OwnedParameter.adopt(full, self.owners)
                continue
            shard = DTensor.from_local(
                self._at_rest(part),
                mesh,
                placements(mesh, e=Shard(0), f=Shard(axis)),
                run_check=False,
            )
            setattr(self.experts, name, nn.Parameter(shard, requires_grad=full.requires_grad))

    def _at_rest(self, part: Tensor) -> Tensor:
        if self.host is not None:
            return self.host.rest(part)
        return part.clone(memory_format=torch.contiguous_format)

    def shards(self) -> list[Tensor]:
        """Local shard of each parameter, in the order of `names`; differentiable."""
        return [to_local(getattr(self.experts, name)) for name in self.names]

    def start_gather(self, split: RouteSplit, dtype: torch.dtype | None = None) -> GatheredWeights:
        """Start to gather the weights that this rank computes with under a split.

        Args:
            dtype: dtype of the gathered weights (autocast's); None: the parameters' own.
        """
        dtype = dtype or self.shards()[0].dtype
        key, layout = (split, dtype), self.layout(split)
        use = GatheredWeights(
            self,
            layout,
            dtype,
            key=key,
            prefetcher=self._prefetcher,
            buffers=lambda device: self._gradient_buffers(split, device),
            drops=self.keep == "regather" and (layout.group.size > 1 or self.host is not None),
            main_grads=lambda: self.experts.main_grads,
        )
        repeated = in_backward()
        ahead = None if repeated else self._prefetcher.enter(self, key)
        if not self.has_kept(key):
            again = self._prefetcher.again(self, key) if repeated else None
            use.start(ahead or again or self.fetch(key))
        return use

    def fetch(self, key: GatherKey) -> GatherHandle:
        """Start the gather of a split in a dtype."""
        split, dtype = key
        self._pin()
        return Gather(self, self.layout(split), dtype)

    def replicate(self, hot: Sequence[int], dtype: torch.dtype | None) -> ReplicatedWeights:
        """Start to bring the weights of hot experts to all ranks."""
        self._pin()
        shards, host = self.shards(), self.host
        return ReplicatedWeights(
            self.names,
            self.activation,
            shards,
            hot,
            degrees=self.degrees,
            rank=self.rank,
            dtype=dtype or shards[0].dtype,
            copy=self.group([list(range(self.degrees.num_ranks))], "the ranks that hold the experts"),
            everyone=self.world.all_ranks(),
            deposit=lambda name, grad, shard: hand_over(name, grad, shard, main=self.experts.main_grads, host=host),
            bring=lambda s: s if host is None else s.to(host.device, non_blocking=True),
            layer=self.layer,
        )

    def _pin(self) -> None:
        """Pin shards that were allocated after construction: copies from unpinned memory do not overlap with
        computation."""
        if self.host is None or self._is_pinned:
            return
        for name in self.names:
            parameter = getattr(self.experts, name)
            parameter._local_tensor = self.host.pinned(parameter._local_tensor)
        self._is_pinned = True

    def has_kept(self, key: GatherKey) -> bool:
        """Whether kept weights exist and are up to date."""
        return self._kept_weights(key) is not None

    def similar_key(self, key: GatherKey) -> GatherKey | None:
        """Key with another layer's route degree and dtype; None: that route degree does not divide this layer's
        ranks."""
        split, dtype = key
        if self.degrees.num_ranks % split.route_degree:
            return None
        return make_split(self.degrees, split.route_degree), dtype

    def _gradient_buffers(self, split: RouteSplit, device: torch.device) -> GradientBuffers:
        if split not in self._buffers:
            self._buffers[split] = GradientBuffers(self, self.layout(split), device)
        return self._buffers[split]

    def versions(self) -> list[int]:
        """Version counters that change with the parameters."""
        # They count copies into parameters, but not fused optimizer steps: hence `follow`.
        parameters = [getattr(self.experts, name) for name in self.names]
        return [p._version for p in parameters] + [s.detach()._version for s in self.shards()]

    def _kept_weights(self, key: GatherKey) -> GatheredTensors | None:
        """Kept weights if they are up to date, else None; all ranks change their parameters together."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] == self.versions():
            return kept[1]
        self._kept.pop(key, None)
        return None

    def finish_gather(self, use: GatheredWeights, *, num_calls: int = 1) -> ExpertParameters:
        """Wait for a gather; returns the parameters of the experts that this rank computes, differentiable."""
        whole = self._kept_weights(use.key)
        if whole is None:
            whole = use.wait()
            # autograd cannot save inference tensors
            may_keep = self._is_following and not torch.is_inference_mode_enabled()
            if self.keep == "until_step" and may_keep:
                self._kept[use.key] = self.versions(), whole
        if not in_backward():
            self._prefetcher.go_ahead(self, use.key)
        return use.parameters(whole, num_calls=num_calls)
