"""Ranks of one machine on cores of one NUMA node each, where the launcher has not bound them.

Memory follows: Linux gives a thread memory of the node that it runs on. Network cards are chosen by the backend.
"""

import os
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys")


def numa_nodes(sysfs: Path = SYSFS) -> dict[int, tuple[int, ...]]:
    """Cores of each NUMA node of the machine, ascending; nodes without cores (memory only) are left out.

    Args:
        sysfs: where the kernel describes the machine.
    """
    found = {
        int(folder.name.removeprefix("node")): numbers_of(read_text(folder / "cpulist"))
        for folder in (sysfs / "devices/system/node").glob("node[0-9]*")
    }
    return {node: cores for node, cores in sorted(found.items()) if cores}


def numbers_of(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5)."""
    spans = [span.partition("-") for span in text.split(",") if span]
    return tuple(n for low, _, high in spans for n in range(int(low), int(high or low) + 1))


def read_text(path: Path) -> str:
    """The text of a file of the kernel, stripped; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def node_of_gpu(properties: object, sysfs: Path = SYSFS) -> int | None:
    """The number of the NUMA node that a GPU is nearest to; None: the system does not say.

    Args:
        properties: of the GPU as PyTorch gives them.
        sysfs: where the kernel describes the machine.
    """
    try:
        domain, bus, device = (
            int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device")
        )
        name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        node = int(read_text(sysfs / "bus/pci/devices" / name / "numa_node"))
    except (AttributeError, ValueError):  # no PCI numbers, or unknown to the kernel
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


def _near_gpu(nodes: dict[int, set[int]]) -> set[int]:
    """Cores of the node of the current GPU; none where the system does not say which that is."""
    import torch  # not needed on a CPU

    node = node_of_gpu(torch.cuda.get_device_properties(torch.cuda.current_device()))
    return set() if node is None else nodes.get(node, set())


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
    """For a run's first line: how many of the machine's cores this process may use; nothing if all."""
    if not hasattr(os, "sched_getaffinity"):
        return ""
    own, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return "" if own == total else f" on {own} of {total} cores"
