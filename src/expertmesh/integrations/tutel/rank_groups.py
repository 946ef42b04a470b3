"""Groups of ranks in Tutel's grid: neighbouring ranks share a model group, ranks of equal position a data group."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.errors import ConfigError


@dataclass(frozen=True)
class RankGroups:
    """Ranks and groups as one process sees them; groups are None on one process."""

    global_size: int  # number of ranks
    global_rank: int
    group_count: int  # number of model groups
    data_rank: int  # number of this rank's model group
    model_size: int  # ranks in a model group
    model_rank: int  # position in it
    local_device: torch.device | None  # the device of this process; None: no backend was given
    global_group: Any = None  # all ranks
    model_group: Any = None  # neighbouring ranks
    data_group: Any = None  # ranks of the same position
    is_distributed: bool = False  # whether torch.distributed is initialised
    local_rank: int = 0  # number of this rank on its machine, as torchrun tells
    local_size: int = 1  # number of ranks of its machine

    @property
    def is_cuda(self) -> bool:
        """Whether the device of this process is a GPU."""
        return self.local_device is not None and self.local_device.type == "cuda"

    def dist_print(self, *values: Any) -> None:
        """Print on rank 0."""
        if self.global_rank == 0:
            print(*values)  # noqa: T201


_made: dict[tuple[int, Any], RankGroups] = {}


def create_groups_from_world(group_count: int, include_init: str | None = None, parent_group: Any = None) -> RankGroups:
    """Part all ranks into groups of neighbours. Every rank must call; equal calls return the same groups.

    Args:
        group_count: number of groups; negative: ranks per group.
        include_init: backend, "nccl" or "gloo", which tells the device of this process; None: as torch's default group.
        parent_group: None or all ranks.
    """
    is_distributed = dist.is_initialized()
    size, rank = (dist.get_world_size(), dist.get_rank()) if is_distributed else (1, 0)
    if is_distributed and dist.get_world_size(parent_group) not in (1, size):
        raise ConfigError(
            f"parent_group: has {dist.get_world_size(parent_group)} of {size} ranks, and only all ranks can be parted; "
            "leave it out"
        )
    count = group_count if group_count > 0 else size // -group_count if group_count else 0
    if count < 1 or size % count:
        raise ConfigError(f"group_count={group_count}: must part {size} ranks evenly; choose a divisor")
    backend = include_init or (dist.get_backend() if is_distributed else None)
    key = (count, dist.group.WORLD if is_distributed else None)
    if key in _made and include_init is None and _are_there(_made[key]):
        return _made[key]
    inner = size // count
    grid = torch.arange(size).view(count, inner)
    groups: dict[str, Any] = {}
    if is_distributed:
        groups = {
            "global_group": dist.group.WORLD,
            "model_group": _own(grid),
            "data_group": _own(grid.T),
        }
    _made[key] = RankGroups(
        size, rank, count, rank // inner, inner, rank % inner, _device(backend),
        is_distributed=is_distributed, local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), **groups,
    )  # fmt: skip
    return _made[key]


def _are_there(made: RankGroups) -> bool:
    """Whether the groups were not destroyed since they were made."""
    try:
        for group in (made.model_group, made.data_group):
            if group is not None:
                dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def _own(grid: torch.Tensor) -> Any:
    """The group of one row of a grid of ranks, the one with this rank; every rank makes all."""
    if len(grid) == 1:
        return dist.group.WORLD
    return dist.new_subgroups_by_enumeration(grid.tolist())[0]


def _device(backend: str | None) -> torch.device | None:
    if backend is None:
        return None
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
