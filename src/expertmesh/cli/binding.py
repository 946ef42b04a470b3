"""CPU binding of a process: its allowed cores, their NUMA nodes, and the NUMA node of its GPU."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from expertmesh.comm.bind import SYSFS, node_of_gpu, numa_nodes
from expertmesh.comm.cores import allowed_cores, users_threads

Mark = Literal["yes", "no", ""]


@dataclass(frozen=True)
class Gpu:
    """GPU of a rank."""

    index: int  # N of cuda:N
    name: str  # product name
    node: int | None  # its NUMA node; None: unknown (as on machines with one node)


@dataclass(frozen=True)
class Binding:
    """Cores and GPU of a process."""

    host: str  # name of the machine
    cores: tuple[int, ...]  # cores that the process may use, ascending
    nodes: tuple[int, ...]  # NUMA nodes of these cores, ascending
    num_nodes: int  # number of NUMA nodes of the machine
    threads: int  # torch's number of threads
    gpu: Gpu | None = None  # GPU of this process, or None
    # variable with which the user set the number of threads, as NAME=VALUE; None: a run measures it
    threads_by: str | None = None

    def verdict(self) -> tuple[Mark, str]:
        """Mark for a correct binding ("" on a machine with one NUMA node), and a description."""
        where = f"cores {core_ranges(self.cores)}"
        if self.num_nodes > 1:
            where += f" of NUMA node{'s' if len(self.nodes) > 1 else ''} {core_ranges(self.nodes)}"
        where += f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        gpu = self.gpu
        if gpu is not None:
            where += f", cuda:{gpu.index} ({gpu.name})"
        if self.num_nodes < 2:
            return "", where + "; one NUMA node"
        if gpu is not None and gpu.node is not None:
            if self.nodes == (gpu.node,):
                return "yes", where + " of the same node"
            return "no", where + f" of node {gpu.node}: start with torchrun --numa-binding=node"
        if len(self.nodes) == 1:
            return "yes", where
        fix = "numactl --cpunodebind=NODE --localalloc before each process"
        return "no", where + f": not bound, so memory may be far away; {fix}"


def own_binding(
    *,
    local_rank: int = 0,  # index of this process and its GPU on the host
    sysfs: Path = SYSFS,
    cores: tuple[int, ...] | None = None,  # cores that this process may use; None: from the system
    gpus: Sequence[Any] | None = None,  # properties of the GPUs, as from PyTorch; None: from PyTorch
) -> Binding:
    """Binding of this process."""
    import torch

    cores = allowed_cores() if cores is None else cores
    if gpus is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    nodes = numa_nodes(sysfs)
    mine = tuple(node for node, has in nodes.items() if set(has) & set(cores))
    gpu = None
    if local_rank < len(gpus):
        properties = gpus[local_rank]
        gpu = Gpu(local_rank, properties.name, node_of_gpu(properties, sysfs))
    threads = torch.get_num_threads()
    return Binding(platform.node(), cores, mine, len(nodes), threads, gpu, users_threads())


def threads_verdict(bindings: Sequence[Binding]) -> tuple[Mark, str]:
    """Mark for whether the threads of a host's processes fit its cores, and a description.

    Without a number from the user, runs measure it, whatever torchrun has set; only a number from the user is judged.
    """
    cores = len({core for binding in bindings for core in binding.cores})
    share = max(cores // len(bindings), 1)
    by = next((binding.threads_by for binding in bindings if binding.threads_by), None)
    if by is None:
        most = f"up to {share} each" if share > 1 else "one each"
        return (
            "yes",
            f"{len(bindings)} ranks on {cores} cores: runs measure how many are fastest, {most}",
        )
    threads = sum(binding.threads for binding in bindings)
    text = f"{len(bindings)} ranks have {threads} threads on {cores} cores, by {by}"
    name = by.partition("=")[0]
    fix = f"leave {name} unset and runs measure how many are fastest, or use {name}={share}"
    if threads > max(cores, len(bindings)):
        return "no", f"{text}, so they wait for one another; {fix}"
    if len(bindings) * share > threads and all(binding.gpu is None for binding in bindings):
        return "no", f"{text}; {fix}"
    return "yes", text


def core_ranges(numbers: Sequence[int]) -> str:
    """Text such as "0-2,5" for [0, 1, 2, 5]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
