"""Kernels for CPUs that all ranks of a job have: hosts may have different processors, and each instruction set has
other bits."""

import logging

import torch
import torch.distributed as dist

from expertmesh.comm.group import RankGroup, wait
from expertmesh.ops.backend import CPU_KERNELS, cpu_kernels, lower_cpu_kernels

_log = logging.getLogger("expertmesh.comm")


def agree_on_kernels(group: RankGroup) -> None:
    """Lower the kernels for CPUs to the best that all ranks have; one collective where all have the same; every rank
    must call."""
    while group.size > 1:
        own = CPU_KERNELS.index(cpu_kernels())
        best, lowest = _ends(own, group)
        if lowest == best:
            return
        if group.rank == 0:
            _log.warning(
                "ranks have kernels for CPUs from %s to %s: all compute by %s, so that bits are equal",
                *(CPU_KERNELS[best], CPU_KERNELS[lowest], CPU_KERNELS[lowest]),
            )
        if own < lowest:
            lower_cpu_kernels(CPU_KERNELS[lowest])  # goes lower still if that cannot be compiled


def _ends(number: int, group: RankGroup) -> tuple[int, int]:
    """Smallest and largest of the ranks' numbers."""
    ends_2 = torch.tensor([-number, number])
    pending = group.start(
        "all_reduce",
        "kernels for CPUs",
        ends_2.nbytes,
        lambda pg: dist.all_reduce(ends_2, dist.ReduceOp.MAX, group=pg, async_op=True),
    )
    wait(pending)
    return -int(ends_2[0]), int(ends_2[1])
