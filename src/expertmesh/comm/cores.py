"""Number of threads that this process can run at once, from its cores, its container's quota and the other ranks of its
host."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from expertmesh.comm.bind import read_text
from expertmesh.config.launched import is_launched, ranks_on_host

_ROOT = Path("/")
_CGROUPS = "sys/fs/cgroup"
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Room(NamedTuple):
    """CPU resources of one process."""

    host: str  # name of the machine
    cores: tuple[int, ...]  # numbers of the cores that the process may run on
    # CPU quota of its control groups in cores, shared with the other processes in them; None: no limit
    quota: float | None


def own_room() -> Room:
    """CPU resources of this process."""
    return Room(platform.node(), allowed_cores(), cpu_quota())


def allowed_cores() -> tuple[int, ...]:
    """Cores that this process may use, ascending; all cores if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU quota in cores: the smallest among this process's control groups; None: no limit."""
    found: list[float | None] = []
    bases: tuple[str, ...]
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:  # version 2
            bases, read = ("", "unified"), _quota_of_v2
        elif "cpu" in controllers.split(","):
            bases, read = (controllers, "cpu", "cpu,cpuacct"), _quota_of_v1
        else:
            continue
        # in a container, the process's own group can be the root, although it has its name outside
        parts = [part for part in path.split("/") if part]
        for base in bases:
            for depth in range(len(parts) + 1):
                found.append(read((root / _CGROUPS / base).joinpath(*parts[:depth])))
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of_v2(group: Path) -> float | None:
    """Quota in cores from a cgroup v2 file "MICROSECONDS PERIOD" or "max PERIOD"."""
    return _ratio(*[*read_text(group / "cpu.max").split(), "", ""][:2])


def _quota_of_v1(group: Path) -> float | None:
    return _ratio(read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return None  # max, -1, or no such file
    return int(quota) / int(period)


def share_of(own: Room, all_rooms: Sequence[Room]) -> int:
    """Number of threads that a process can run at once while all processes of its host do the same; at least 1."""
    here = [room for room in all_rooms if room.host == own.host]
    share = sum(1 / sum(core in room.cores for room in here) for core in own.cores)
    if own.quota is not None:
        share = min(share, own.quota / len(here))
    return max(1, int(share + 1e-6))


def users_threads(launcher: int | None = None) -> str | None:
    """Environment variable by which the user has set the number of threads, as NAME=VALUE; None if not set, or set by
    torchrun.

    Torchrun sets OMP_NUM_THREADS=1 for several ranks if the user has not set it. The environment that torchrun itself
    started with tells the two apart.
    """
    name = next((name for name in _NAMES if os.environ.get(name)), None)
    if name is None:
        return None
    if is_launched() and ranks_on_host() > 1 and os.environ.get(_NAMES[0]) == "1":
        try:
            began_with = Path(f"/proc/{launcher or os.getppid()}/environ").read_bytes()
        except OSError:
            return f"{name}={os.environ[name]}"
        if not any(began_with.startswith(f"{n}=".encode()) or f"\0{n}=".encode() in began_with for n in _NAMES):
            return None
    return f"{name}={os.environ[name]}"
