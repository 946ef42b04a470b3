"""Ranks of one machine on cores of one NUMA node each, where the launcher has not bound them.

Memory follows: Linux gives a thread memory of the node that it runs on. Network cards are chosen by the backend.
"""

import os
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys/devices/system/node")


def cores_of_nodes(sysfs: Path = SYSFS) -> list[set[int]]:
    """Cores of each NUMA node that has some, in the order of their numbers."""
    folders = sorted(sysfs.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [cores for folder in folders if (cores := _cores(folder))]


def _cores(folder: Path) -> set[int]:
    try:
        spans = (folder / "cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    pairs = [span.partition("-") for span in spans if span]
    return {n for low, _, high in pairs for n in range(int(low), int(high or low) + 1)}


def node_of_gpu(properties: object, sysfs: Path) -> int | None:
    """The number of the NUMA node that a GPU is nearest to; None: the system does not say.

    Args:
        properties: of the GPU as PyTorch gives them.
        sysfs: where the kernel describes the machine, /sys.
    """
    try:
        domain, bus, device = (
            int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device")
        )
        name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        node = int((sysfs / "bus/pci/devices" / name / "numa_node").read_text())
    except (AttributeError, ValueError, OSError):  # no PCI numbers, or unknown to the kernel
        return None
    return node if node >= 0 else None


def share_of(
    local_rank: int,
    num_local: int,
    nodes: Sequence[set[int]],
    allowed: set[int],
    *,
    near: AbstractSet[int] = frozenset(),
) -> set[int] | None:
    """The cores of the node that a rank is to run on; None: it stays where it is.

    Args:
        local_rank: of the ranks of this machine.
        num_local: of them.
        nodes: cores of each NUMA node.
        allowed: cores that the rank may use now. If they are on one node, somebody has bound it already.
        near: cores of the node of the rank's GPU; none: it has no GPU, or one of which the system does not say where it is.
    """
    mine = [cores & allowed for cores in nodes if cores & allowed]
    if len(mine) < 2 or num_local < 2:
        return None
    return allowed & near or mine[local_rank * len(mine) // num_local]


def _near_gpu(sysfs: Path = SYSFS) -> set[int]:
    """Cores of the node of the current GPU."""
    import torch  # not needed on a CPU

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    node = node_of_gpu(properties, sysfs.parents[2])
    return set() if node is None else _cores(sysfs / f"node{node}")


@contextmanager
def bind_ranks(how: str, *, has_gpu: bool = False) -> Iterator[None]:
    """Bind this process for a while, if torchrun started it with others and `how` is "auto".

    Args:
        how: "auto", or anything else for not at all.
        has_gpu: whether it computes on the current GPU, near which it then goes.
    """
    local, number = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    cores, before = None, set()
    if (
        how == "auto"
        and local is not None
        and number is not None
        and hasattr(os, "sched_setaffinity")
    ):
        before = os.sched_getaffinity(0)
        near = _near_gpu() if has_gpu else set()
        cores = share_of(int(local), int(number), cores_of_nodes(), before, near=near)
    if cores is None:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bound_to() -> str:
    """For a run's first line: how many of the machine's cores this process may use; nothing if all."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    own, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return "" if own == total else f" on {own} of {total} cores"
