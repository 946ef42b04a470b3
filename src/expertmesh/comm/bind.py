"""Ranks of one machine on cores of one NUMA node each, where the launcher has not bound them.

Memory follows: Linux gives a thread memory of the node that it runs on. Network cards are chosen by the backend.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SYSFS = Path("/sys/devices/system/node")


def cores_of_nodes(sysfs: Path = SYSFS) -> list[set[int]]:
    """Cores of each NUMA node that has some, in the order of their numbers."""
    found = []
    for folder in sorted(sysfs.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            spans = (folder / "cpulist").read_text().strip().split(",")
        except OSError:
            continue
        pairs = [span.partition("-") for span in spans if span]
        cores = {n for low, _, high in pairs for n in range(int(low), int(high or low) + 1)}
        found += [cores] if cores else []
    return found


def share_of(
    local_rank: int, num_local: int, nodes: Sequence[set[int]], allowed: set[int]
) -> set[int] | None:
    """The cores of the node that a rank is to run on; None: it stays where it is.

    Args:
        local_rank: of the ranks of this machine.
        num_local: of them.
        nodes: cores of each NUMA node.
        allowed: cores that the rank may use now. If they are on one node, somebody has bound it already.
    """
    mine = [cores & allowed for cores in nodes if cores & allowed]
    if len(mine) < 2 or num_local < 2:
        return None
    return mine[local_rank * len(mine) // num_local]


@contextmanager
def bind_ranks(how: str) -> Iterator[None]:
    """Bind this process for a while, if torchrun started it with others and `how` is "auto"."""
    local, number = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    cores, before = None, set()
    if (
        how == "auto"
        and local is not None
        and number is not None
        and hasattr(os, "sched_setaffinity")
    ):
        before = os.sched_getaffinity(0)
        cores = share_of(int(local), int(number), cores_of_nodes(), before)
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
