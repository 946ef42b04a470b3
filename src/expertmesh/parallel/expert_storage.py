"""The one storage of a layer's experts: every parameter sharded e ways along E and f ways along F, never moving.

The parameters stay where they are named (`experts.w_in`, ...), as DTensors over the mesh ("replica", "e", "f"): so
optimisers, checkpoints and norms know how they are laid out. `start_gather` and `finish_gather` make from them what
one plan needs; the gradient goes back by a reduce-scatter to the shards and a sum over the copies.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from expertmesh.comm.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from expertmesh.comm.group import Pending, RankGroup, wait_for
from expertmesh.comm.mesh import ExpertDegrees, expert_mesh
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.moe.experts import ExpertParameters, GroupedExperts
from expertmesh.parallel.plan import Plan

Keep = Literal["until_step", "until_backward", "regather"]

# Axis of each parameter that the f slices cut; b_out has no hidden axis, and is cut along D.
_SLICED_AXIS = {"w_in": 2, "w_out": 2, "b_in": 2, "b_out": 1}


@dataclass(frozen=True)
class Layout:
    """How the shards of one plan lie together on this rank.

    Attributes:
        group: ranks that share their shards.
        order: slice j of part i is the shard of the group's rank order[j][i].
        offset_f: first slice that this rank computes.
    """

    group: RankGroup
    order: tuple[tuple[int, ...], ...]
    offset_f: int

    def join(self, shards: Tensor, axis: int) -> Tensor:
        """(n, e', ...) shards of one parameter -> (parts * e', ...) with the slices side by side along `axis`."""
        slices = []
        for members in self.order:
            in_order = members == tuple(range(len(shards)))
            slices.append((shards if in_order else shards[list(members)]).flatten(0, 1))
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=axis)

    def split(self, whole: Tensor, axis: int) -> Tensor:
        """The inverse of `join`."""
        parts, width = len(self.order[0]), whole.shape[axis] // len(self.order)
        if len(self.order) == 1 and self.order[0] == tuple(range(parts)):
            return whole.unflatten(0, (parts, -1))
        first = whole.narrow(axis, 0, width).unflatten(0, (parts, -1))
        shards = whole.new_empty(parts * len(self.order), *first.shape[1:])
        for j, members in enumerate(self.order):
            shards[list(members)] = whole.narrow(axis, j * width, width).unflatten(0, (parts, -1))
        return shards


class _Gathering:
    """One gather of one forward: under way, done, or gone and to be made again in the backward."""

    def __init__(self, storage: "ExpertStorage", plan: Plan, dtype: torch.dtype) -> None:
        self.storage, self.layout, self.dtype = storage, storage.layout(plan), dtype
        self._started: list[tuple[Tensor, Pending | None]] = []
        self._regathered: list[Tensor] | None = None
        self.kept_key = plan, dtype
        self._addresses: dict[int, int] = {}

    def start(self) -> None:
        """Launch the collectives."""
        where = f"{self.storage.layer}, weights"
        self._started = [
            start_all_gather(shard.to(self.dtype), self.layout.group, where=where)
            for shard in self.storage.shards()
        ]

    def finish(self) -> list[Tensor]:
        """Wait, and put the shards together: one tensor per name of the storage."""
        started, self._started = self._started, []
        whole = []
        for (shards, pending), name in zip(started, self.storage.names, strict=True):
            wait_for(pending)
            whole.append(self.layout.join(shards, _SLICED_AXIS[name]))
        return whole

    def watch(self, whole: Sequence[Tensor]) -> None:
        """Let `dropping` know these tensors, which live while it is open. b_out is small and padded: it is kept."""
        self._addresses = {
            t.untyped_storage().data_ptr(): n
            for n, t in enumerate(whole)
            if self.storage.names[n] != "b_out"
        }

    def dropping(self) -> AbstractContextManager[object]:
        """Autograd keeps a note in the place of each watched tensor, and gathers again when it needs it."""

        def pack(tensor: Tensor) -> Any:
            number = self._addresses.get(tensor.untyped_storage().data_ptr())
            if number is None or tensor.numel() == 0:
                return tensor
            return number, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            number, shape, stride, offset = packed
            if self._regathered is None:
                self.start()
                self._regathered = self.finish()
            return self._regathered[number].as_strided(shape, stride, offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def reduce(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Sum gradients of the gathered parameters over all ranks; each rank gets those of its shards."""
        self._regathered = None
        where = f"{self.storage.layer}, weight gradients"
        pairs = list(zip(grads, self.storage.names, self.storage.shards(), strict=True))
        started = [
            None
            if grad is None
            else start_reduce_scatter(
                self.layout.split(grad.to(shard.dtype), _SLICED_AXIS[name]),
                self.layout.group,
                where=where,
            )
            for grad, name, shard in pairs
        ]
        reduced: list[Tensor | None] = []
        for item in started:
            if item is None:
                reduced.append(None)
                continue
            grad, pending = item
            wait_for(pending)
            grad = grad.contiguous()
            wait_for(start_all_reduce(grad, self.storage.replicas, where=where))
            reduced.append(grad)
        return reduced


class _Gather(torch.autograd.Function):
    """Shards in, whole parameters of one plan out."""

    @staticmethod
    def forward(ctx: Any, gathering: _Gathering, whole: list[Tensor], *shards: Tensor) -> Any:
        ctx.gathering = gathering
        ctx.set_materialize_grads(False)
        # New tensors: the same gathered one may serve several forwards, each with a gradient of its own.
        return tuple(tensor.detach() for tensor in whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = [
            g if need else None for g, need in zip(grads, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *ctx.gathering.reduce(needed)


class ExpertStorage:
    """Shards the parameters of grouped experts, and gathers them as a plan asks.

    A loss is the sum of the losses of all ranks: gradients are sums over ranks, not means.

    Args:
        experts: their full parameters are replaced by shards; on the meta device nothing is allocated.
        world: all ranks; every one must construct the storage.
        degrees: how the W ranks of one copy hold the experts; world.size / W copies are kept equal.
        keep: how long gathered weights live. "until_step": until a parameter changes, so that all micro-batches of a
            step share one gather, and only with `follow`; "until_backward": of the forward that gathered them; "regather": until the experts
            have run, and once more in the backward.
        layer: name for errors and the byte counter.

    Raises:
        ConfigError: a parameter cannot be cut evenly.
    """

    def __init__(
        self,
        experts: GroupedExperts,
        world: World,
        degrees: ExpertDegrees,
        *,
        keep: Keep = "until_backward",
        layer: str = "experts",
    ) -> None:
        self.experts, self.world, self.degrees = experts, world, degrees
        self.keep, self.layer = keep, layer
        W = degrees.num_ranks
        self.rank = world.position % W
        self.num_replicas = world.size // W
        cells = [[r + W * copy for copy in range(self.num_replicas)] for r in range(W)]
        self.replicas: RankGroup = world.group(cells, name="copies of the experts")
        self._layouts: dict[Plan, Layout] = {}
        self._kept: dict[tuple[Plan, torch.dtype], tuple[list[int], list[Tensor]]] = {}
        self.names = [name for name in _SLICED_AXIS if getattr(experts, name) is not None]
        self._is_following = False
        self._shard_parameters()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget kept weights after each step of an optimiser; until this is called, "until_step" keeps none."""
        self._is_following = True
        optimizer.register_step_post_hook(lambda *_: self._kept.clear())

    def _shard_parameters(self) -> None:
        mesh = expert_mesh(self.world, self.degrees)
        i, j = self.degrees.coordinates(self.rank)
        for name in self.names:
            full, axis = getattr(self.experts, name), _SLICED_AXIS[name]
            for cut, parts in ((0, self.degrees.e), (axis, self.degrees.f)):
                if full.shape[cut] % parts:
                    raise ConfigError(
                        f"{self.layer}: {name} of shape {tuple(full.shape)} cannot be cut into {parts} equal parts along "
                        f"axis {cut}; choose another es_degree, or sizes that it divides"
                    )
            rows, columns = full.shape[0] // self.degrees.e, full.shape[axis] // self.degrees.f
            part = full.detach().narrow(0, i * rows, rows).narrow(axis, j * columns, columns)
            shard = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                mesh,
                [Replicate(), Shard(0), Shard(axis)],
                run_check=False,
            )
            setattr(self.experts, name, nn.Parameter(shard, requires_grad=full.requires_grad))

    def shards(self) -> list[Tensor]:
        """This rank's part of each parameter, in the order of `names`; differentiable."""
        return [getattr(self.experts, name).to_local() for name in self.names]

    def layout(self, plan: Plan) -> Layout:
        """Where the shards of a plan come from; every rank must ask when a plan is used first."""
        if plan not in self._layouts:
            self._layouts[plan] = self._new_layout(plan)
        return self._layouts[plan]

    def _new_layout(self, plan: Plan) -> Layout:
        cells = plan.gather_cells()
        members = next(cell for cell in cells if self.rank in cell)
        block_e, block_f = plan.block(self.rank)
        first_e, first_f = block_e * plan.gather_e, block_f * plan.gather_f
        order = tuple(
            tuple(
                members.index(self.degrees.rank_of(first_e + i, first_f + j))
                for i in range(plan.gather_e)
            )
            for j in range(plan.gather_f)
        )
        return Layout(self.group(cells, "the ranks that share weights"), order, first_f)

    def group(self, cells: list[list[int]], name: str) -> RankGroup:
        """This rank's cell of a partition of the ranks of one copy, alike in all copies; every rank must ask."""
        W = self.degrees.num_ranks
        all_cells = [
            [W * copy + r for r in cell] for copy in range(self.num_replicas) for cell in cells
        ]
        return self.world.group(all_cells, name=name)

    def start_gather(self, plan: Plan, dtype: torch.dtype | None = None) -> _Gathering:
        """Begin to gather what this rank computes under a plan.

        Args:
            plan: the same on all ranks.
            dtype: to gather in (that of autocast); None: the parameters' own.
        """
        gathering = _Gathering(self, plan, dtype or self.shards()[0].dtype)
        if self._kept_tensors(gathering.kept_key) is None:
            gathering.start()
        return gathering

    def _versions(self) -> list[int]:
        # Sees copies into parameters, but not the fused steps of optimisers: hence `follow`.
        parameters = [getattr(self.experts, name) for name in self.names]
        return [p._version for p in parameters] + [s.detach()._version for s in self.shards()]

    def _kept_tensors(self, key: tuple[Plan, torch.dtype]) -> list[Tensor] | None:
        """Gathered weights that are still those of the parameters; all ranks change these together."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] == self._versions():
            return kept[1]
        self._kept.pop(key, None)
        return None

    def finish_gather(self, gathering: _Gathering) -> ExpertParameters:
        """Wait for a gather; returns the parameters of the experts that this rank computes, differentiable."""
        whole = self._kept_tensors(gathering.kept_key)
        if whole is None:
            whole = gathering.finish()
            if self.keep == "until_step" and self._is_following:
                self._kept[gathering.kept_key] = self._versions(), whole
        drops = self.keep == "regather" and gathering.layout.group.size > 1
        if drops:
            gathering.watch(whole)
        found = dict(zip(self.names, _Gather.apply(gathering, whole, *self.shards()), strict=True))
        return ExpertParameters(
            found["w_in"],
            found["w_out"],
            found.get("b_in"),
            self._padded_bias(found.get("b_out"), gathering.layout),
            gathering.dropping if drops else nullcontext,
        )

    def _padded_bias(self, b_out: Tensor | None, layout: Layout) -> Tensor | None:
        """Each slice adds its own columns of b_out, so that the sum over slices adds it once."""
        if b_out is None:
            return None
        D = self.experts.w_out.shape[1]
        first = layout.offset_f * (D // self.degrees.f)
        return nn.functional.pad(b_out, (first, D - first - b_out.shape[1]))
