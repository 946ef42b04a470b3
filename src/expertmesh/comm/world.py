"""All ranks that share one model, and the process groups and device meshes among them."""

import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertmesh.comm.agree import agree_on_kernels
from expertmesh.comm.group import RankGroup, Traffic
from expertmesh.errors import ConfigError

DEFAULT_TIMEOUT_S = 300.0


def device_type_of(backends: str, *, has_gpu: bool) -> str:
    """Device type of the tensors of a process group: "cuda" if it has NCCL for them and there is a GPU, else "cpu"."""
    return "cuda" if has_gpu and _backend_of(backends).get("cuda") == "nccl" else "cpu"


def check_backend(device_type: str, backends: str) -> None:
    """Raise ConfigError if a process group has no backend for a type of device."""
    known = _backend_of(backends)
    if device_type not in known:
        fix = "nccl" if device_type == "cuda" else "cpu:gloo,cuda:nccl"
        raise ConfigError(
            f"tensors on {device_type}: the process group moves those on {', '.join(known)} only; call "
            f'torch.distributed.init_process_group("{fix}"), or move the model'
        )


def _backend_of(backends: str) -> dict[str, str]:
    """Map from type of device to backend."""
    pairs = (each.partition(":") for each in backends.split(","))
    return {device: backend for device, _, backend in pairs}


def _names_of_node(rank: int) -> tuple[str, ...]:
    """Identifiers of this rank's node: torchrun agent, host name, first rank of the node."""
    local = os.environ.get("LOCAL_RANK")
    first = 0 if local is None else rank - int(local)
    return os.environ.get("GROUP_RANK", ""), platform.node(), str(first)


def nodes_of(names: Sequence[tuple[str, ...]], ranks: Sequence[int]) -> tuple[int, ...]:
    """Node of each rank, numbered by the node's first rank.

    Args:
        names: for each rank: its agent's number ("" without torchrun), its host's name, and the first rank of its
            launcher's local ranks.
        ranks: the ranks' numbers.
    """
    agents, hosts, _ = (set(column) for column in zip(*names, strict=True))
    which = 0 if "" not in agents else 1 if len(hosts) > 1 else 2
    first: dict[str, int] = {}
    return tuple(first.setdefault(n[which], rank) for n, rank in zip(names, ranks, strict=True))


class World:
    """All ranks of one process group, with the groups and meshes among them, created on first use.

    Positions count the ranks of the group from 0. Layers of one model share one world, because each new group costs
    threads and connections; `close` destroys them. On CPUs they agree on one set of kernels. If the given group is not
    torch's default group, its members must so far have been in equally many groups, because torch names new subgroups
    by that number. Create only one world over such a group: after a `close`, groups of another world can get names of
    closed groups, whose old addresses are still in torch's store.

    Args:
        group: any process group; None: torch's default group.
        device_type: the tensors' device type, "cpu" or "cuda"; None: the group's, see `device_type_of`.
        timeout_s: timeout of collectives on the groups made here; the given group keeps its own.

    Raises:
        ConfigError: torch.distributed is not initialised, or the group has no backend for such tensors.
        CollectiveError: another rank of the group is gone.
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
        self._backends = dist.get_backend_config(group or dist.group.WORLD)
        if device_type is None:
            device_type = device_type_of(self._backends, has_gpu=torch.cuda.is_available())
        self.device_type = device_type
        self.check_moves(device_type)
        self.timeout_s = timeout_s
        self.traffic = Traffic()
        self._made: list[dist.ProcessGroup] = []
        self._nodes: tuple[int, ...] | None = None
        self._is_default = len(self.ranks) == dist.get_world_size()
        self._group = group or dist.group.WORLD
        self._groups: dict[tuple[tuple[int, ...], ...], RankGroup] = {}
        self._meshes: dict[tuple[tuple[Any, ...], ...], DeviceMesh] = {}
        everyone = self.all_ranks()  # the first request for a group names it
        if device_type == "cpu":
            agree_on_kernels(everyone)

    def __deepcopy__(self, memo: dict[int, object]) -> "World":
        """Return the world itself: copies of a layer talk to the same ranks."""
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def check_moves(self, device_type: str) -> None:
        """Raise ConfigError where the ranks have no backend for tensors of a device."""
        check_backend(device_type, self._backends)

    def nodes(self) -> tuple[int, ...]:
        """Node of each rank, numbered by the default-group rank of the node's first rank; every rank must call.

        Ranks of one torchrun agent are on one node (GROUP_RANK). Without torchrun, ranks of one host are. If all ranks
        are on one host, other launchers' LOCAL_RANK decides, with ranks numbered node by node.
        """
        if self._nodes is None:
            found: list[tuple[str, ...]] = [()] * self.size
            here = _names_of_node(dist.get_rank())
            dist.all_gather_object(found, here, group=self._group)
            self._nodes = nodes_of(found, self.ranks)
        return self._nodes

    def all_ranks(self) -> RankGroup:
        """Group of all ranks."""
        return self.group([range(self.size)], name="all ranks")

    def group(self, cells: Sequence[Sequence[int]], *, name: str) -> RankGroup:
        """Group of this rank's cell in a partition of all ranks; every rank must call with the same partition.

        Args:
            cells: positions, each in exactly one cell.
            name: for error messages.
        """
        # The key is the whole partition, so that all ranks agree on which groups are new.
        key = tuple(sorted(tuple(sorted(cell)) for cell in cells))
        if key not in self._groups:
            self._groups[key] = self._new_group(key, name)
        return self._groups[key]

    def _new_group(self, cells: tuple[tuple[int, ...], ...], name: str) -> RankGroup:
        mine = next(cell for cell in cells if self.position in cell)
        found = self._group if len(mine) == self.size else None
        widest = max(map(len, cells))
        for cell in cells if 1 < widest < self.size else ():
            # In torch's default world every rank takes part in making every group; elsewhere only the members may.
            # Single ranks make a group too, so that all ranks are in equally many: torch names subgroups by that
            # number.
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
        result: dist.ProcessGroup = group
        return result

    def close(self) -> None:
        """Destroy the groups that this world made; its layers can no longer be used."""
        made, self._made = self._made, []
        for group in made:
            dist.destroy_process_group(group)
        meshes, self._groups, self._meshes = self._meshes, {}, {}
        if meshes:
            from torch.distributed.tensor import debug  # here, because it imports torch's compiler

            # DTensor caches operator results by mesh, and an equal mesh of another world has other groups.
            clear = getattr(debug, "_clear_sharding_prop_cache", None)
            if clear is not None:
                clear()

    def mesh(self, shape: Sequence[int], names: Sequence[str], order: Sequence[int]) -> DeviceMesh:
        """Device mesh over all ranks; every rank must call.

        Args:
            shape: size of each axis; their product is the number of ranks.
            names: names of the axes.
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
        self._meshes[key] = DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=tuple(names))
        return self._meshes[key]

    def _group_of_axis(self, group: RankGroup) -> dist.ProcessGroup:
        """Process group of one axis of a mesh; an axis of one rank needs one too."""
        if group.process_group is None:
            for position in range(self.size) if self._is_default else (self.position,):
                made = self._torch_group([position])
                if position == self.position:
                    group.process_group = made
        assert group.process_group is not None
        return group.process_group
