"""The ranks that one model is spread over, and the groups among them."""

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.comm.group import RankGroup, Traffic
from expertmesh.errors import ConfigError

DEFAULT_TIMEOUT_S = 300.0


def device_type_of(backends: str, *, has_gpu: bool) -> str:
    """The type of the tensors that a process group is for: "cuda" where NCCL moves those and there is a GPU, else "cpu".

    Args:
        backends: of the group, as torch writes them: "cpu:gloo,cuda:nccl".
        has_gpu: whether there is one.
    """
    return "cuda" if has_gpu and _backend_of(backends).get("cuda") == "nccl" else "cpu"


def check_backend(device_type: str, backends: str) -> None:
    """Refuse tensors that a process group cannot move.

    Args:
        device_type: of the tensors.
        backends: see `device_type_of`.

    Raises:
        ConfigError: it has no backend for them.
    """
    known = _backend_of(backends)
    if device_type not in known:
        fix = "nccl" if device_type == "cuda" else "cpu:gloo,cuda:nccl"
        raise ConfigError(
            f"tensors on {device_type}: the process group moves those on {', '.join(known)} only; call "
            f'torch.distributed.init_process_group("{fix}"), or move the model'
        )


def _backend_of(backends: str) -> dict[str, str]:
    """By type of device."""
    pairs = (each.partition(":") for each in backends.split(","))
    return {device: backend for device, _, backend in pairs}


def _names_of_node(rank: int) -> tuple[str, ...]:
    """What this rank knows of its node: number of the agent, name of the host, number of the node's first rank."""
    local = os.environ.get("LOCAL_RANK")
    first = 0 if local is None else rank - int(local)
    return os.environ.get("GROUP_RANK", ""), platform.node(), str(first)


def nodes_of(names: Sequence[tuple[str, ...]], ranks: Sequence[int]) -> tuple[int, ...]:
    """The number of the first rank of each rank's node.

    Args:
        names: of each rank: number of its agent ("": there is none), name of its host, number of the first rank that its
            launcher counts together with it.
        ranks: their numbers.
    """
    agents, hosts, _ = (set(column) for column in zip(*names, strict=True))
    which = 0 if "" not in agents else 1 if len(hosts) > 1 else 2
    first: dict[str, int] = {}
    return tuple(first.setdefault(n[which], rank) for n, rank in zip(names, ranks, strict=True))


class World:
    """All ranks of one process group, and groups among them, made when first asked for.

    Positions count the ranks of the group from 0. Layers of one model share one world, because each new group costs
    threads and connections; `close` ends them. For a group that is not torch's default group its members must so
    far have been in equally many groups: that is how torch names a new group of some of the ranks. Over such a group make one world only:
    after a `close` the next one's groups can get the names of the closed ones, whose ranks' old addresses are still in torch's store.

    Args:
        group: any process group; None: torch's default group.
        device_type: of the tensors, "cpu" or "cuda"; None: that which the group is for, see `device_type_of`.
        timeout_s: of collectives on the groups that this makes; the given group keeps its own.

    Raises:
        ConfigError: torch.distributed is not initialised, or the group has no backend for such tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device_type: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed has no process group; call torch.distributed.init_process_group first, or start "
                "with torchrun"
            )
        self.ranks = tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
        self.position = self.ranks.index(dist.get_rank())
        backends = dist.get_backend_config(group or dist.group.WORLD)
        if device_type is None:
            device_type = device_type_of(backends, has_gpu=torch.cuda.is_available())
        self.device_type = device_type
        check_backend(self.device_type, backends)
        self.timeout_s = timeout_s
        self.traffic = Traffic()
        self._made: list[dist.ProcessGroup] = []
        self._nodes: tuple[int, ...] | None = None
        self._is_default = len(self.ranks) == dist.get_world_size()
        self._group = group or dist.group.WORLD
        self._groups: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
        self._meshes: dict[tuple[tuple[Any, ...], ...], DeviceMesh] = {}
        self.all_ranks()  # the first who asks for a group gives it its name

    def __deepcopy__(self, memo: dict[int, object]) -> "World":
        """The same world: copies of a layer talk to the same ranks."""
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def nodes(self) -> tuple[int, ...]:
        """The node of each rank, by the number in torch's world of the node's first rank; every rank must ask.

        Ranks of one agent of torchrun are on one node (GROUP_RANK). Without torchrun those of one host are, or, where all
        are on one host, those that other launchers count together (LOCAL_RANK, with ranks numbered node by node).
        """
        if self._nodes is None:
            found: list[tuple[str, ...]] = [()] * self.size
            here = _names_of_node(dist.get_rank())
            dist.all_gather_object(found, here, group=self._group)
            self._nodes = nodes_of(found, self.ranks)
        return self._nodes

    def all_ranks(self) -> RankGroup:
        """The group of all ranks."""
        return self.group([range(self.size)], name="all ranks")

    def group(self, cells: Sequence[Sequence[int]], *, name: str) -> RankGroup:
        """This rank's cell of a partition of all ranks; every rank must ask, with the same partition.

        Args:
            cells: positions, each in exactly one cell.
            name: for error messages.
        """
        # By the whole partition, so that all ranks agree on what is new.
        key = tuple(sorted(tuple(sorted(cell)) for cell in cells))
        if key not in self._groups:
            self._groups[key] = self._new_group(key, name)
        return self._groups[key]

    def _new_group(self, cells: tuple[tuple[int, ...], ...], name: str) -> RankGroup:
        mine = next(cell for cell in cells if self.position in cell)
        found = self._group if len(mine) == self.size else None
        widest = max(map(len, cells))
        for cell in cells if 1 < widest < self.size else ():
            # In torch's default world every rank takes part in making every group; elsewhere only the members may. Ranks
            # alone make one, too, so that all are in equally many: torch names the groups of some ranks by that number.
            if self._is_default or cell == mine:
                made = self._torch_group(cell)
                found = made if cell == mine else found
        return RankGroup(
            found,
            ranks=tuple(self.ranks[p] for p in mine),
            rank=mine.index(self.position),
            name=name,
            timeout_s=self.timeout_s,
            traffic=self.traffic,
        )

    def _torch_group(self, cell: Sequence[int]) -> dist.ProcessGroup:
        group = dist.new_group(
            [self.ranks[p] for p in cell],
            timeout=timedelta(seconds=self.timeout_s),
            use_local_synchronization=not self._is_default,
        )
        if self.position in cell:
            self._made.append(group)
        return group

    def close(self) -> None:
        """End the groups that this made; their layers can be used no more."""
        made, self._made = self._made, []
        for group in made:
            dist.destroy_process_group(group)
        meshes, self._groups, self._meshes = self._meshes, {}, {}
        if meshes:
            from torch.distributed.tensor import debug  # here, because it imports torch's compiler

            # DTensor keeps results of its operators by mesh, and an equal mesh of another world has other groups.
            clear = getattr(debug, "_clear_sharding_prop_cache", None)
            if clear is not None:
                clear()

    def mesh(self, shape: Sequence[int], names: Sequence[str], order: Sequence[int]) -> DeviceMesh:
        """A device mesh over all ranks; every rank must ask for it.

        Args:
            shape: size of each axis; their product is the number of ranks.
            names: of the axes.
            order: positions in row-major order of the mesh.
        """
        key = (tuple(shape), tuple(names), tuple(order))
        if key in self._meshes:
            return self._meshes[key]
        grid = torch.tensor(list(order)).view(*shape)
        groups = []
        for axis, name in enumerate(names):
            cells = grid.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
            groups.append(self._group_of_axis(self.group(cells, name=f"axis {name}")))
        ranks = torch.tensor(self.ranks)[grid]
        self._meshes[key] = DeviceMesh.from_group(
            groups, self.device_type, mesh=ranks, mesh_dim_names=tuple(names)
        )
        return self._meshes[key]

    def _group_of_axis(self, group: RankGroup) -> dist.ProcessGroup:
        """A mesh needs a process group for an axis of one rank too."""
        if group.process_group is None:
            for position in range(self.size) if self._is_default else (self.position,):
                made = self._torch_group([position])
                if position == self.position:
                    group.process_group = made
        assert group.process_group is not None
        return group.process_group
