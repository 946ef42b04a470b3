"""NUMA binding: each rank of a machine runs on the cores of one NUMA node, unless the launcher has bound it.

Memory follows the cores: Linux allocates on the node of the running thread. The communication backend chooses network
cards.
"""

import os
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys")


def numa_nodes(sysfs: Path = SYSFS) -> dict[int, tuple[int, ...]]:
    """Cores of each NUMA node of the machine, ascending; nodes without cores (memory only) are left out."""
    found = {
        int(folder.name.removeprefix("node")): numbers_of(read_text(folder / "cpulist"))
        for folder in (sysfs / "devices/system/node").glob("node[0-9]*")
    }
    return {node: cores for node, cores in sorted(found.items()) if cores}


def numbers_of(text: str) -> tuple[int, ...]:
    """Parse a kernel list of numbers: "0-2,5" is (0, 1, 2, 5)."""
    spans = [span.partition("-") for span in text.split(",") if span]
    return tuple(n for low, _, high in spans for n in range(int(low), int(high or low) + 1))


def read_text(path: Path) -> str:
    """Read a text file of the kernel, stripped; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def node_of_gpu(properties: object, sysfs: Path = SYSFS) -> int | None:
    """Number of the NUMA node nearest to a GPU; None if the system does not say."""
    try:
        domain, bus, device = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        node = int(read_text(sysfs / "bus/pci/devices" / name / "numa_node"))
    except (AttributeError, ValueError):  # no PCI numbers, or unknown to the kernel
        return None
    return node if node >= 0 else None


def share_of(
    local_rank: int,  # index of the rank on this machine
    num_local: int,  # number of ranks on this machine
    nodes: Sequence[set[int]],  # cores of each NUMA node
    allowed: set[int],  # cores that the rank may use now. If all are on one node, the rank is bound already.
    *,
    near: AbstractSet[int] = frozenset(),
) -> set[int] | None:
    """Cores of the NUMA node that a rank should run on; None: leave it unbound."""
    mine = [cores & allowed for cores in nodes if cores & allowed]
    if len(mine) < 2 or num_local < 2:
        return None
    return allowed & near or mine[local_rank * len(mine) // num_local]


def _near_gpu(nodes: dict[int, set[int]]) -> set[int]:
    """Cores of the node nearest to the current GPU; empty if its node is unknown."""
    import torch  # not needed on a CPU

    node = node_of_gpu(torch.cuda.get_device_properties(torch.cuda.current_device()))
    return set() if node is None else nodes.get(node, set())


@contextmanager
def bind_ranks(how: str, *, has_gpu: bool = False) -> Iterator[None]:
    """Bind this process to one NUMA node inside the context, if torchrun started several on this host and `how` is
    "auto".

    Args:
        how: "auto"; any other value binds nothing.
        has_gpu: whether the process computes on the current GPU; it is then bound near that GPU.
    """
    local, number = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    cores, before = None, set()
    if how == "auto" and local is not None and number is not None and hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        nodes = {node: set(own) for node, own in numa_nodes().items()}
        near = _near_gpu(nodes) if has_gpu else set()
        cores = share_of(int(local), int(number), list(nodes.values()), before, near=near)
    if cores is None:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bound_to() -> str:
    """Text for a run's first line: number of cores that this process may use, out of all; "" if all."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    own, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return "" if own == total else f" on {own} of {total} cores"
