"""Which cores a process may use, which NUMA nodes they belong to, and whether its GPU is near them."""

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
    """A rank's GPU.

    Attributes:
        index: N of cuda:N.
        name: of the product.
        node: its NUMA node; None: the system does not say (as on machines with one node).
    """

    index: int
    name: str
    node: int | None


@dataclass(frozen=True)
class Binding:
    """Where one process may run.

    Attributes:
        host: name of the machine.
        cores: that the process may use, ascending.
        nodes: the machine's NUMA nodes that these cores belong to, ascending.
        num_nodes: all NUMA nodes of the machine.
        threads: of torch.
        gpu: of this process, if there is one.
        threads_by: the variable by which the user has set the threads, as NAME=VALUE; None: a run measures how many are fastest.
    """

    host: str
    cores: tuple[int, ...]
    nodes: tuple[int, ...]
    num_nodes: int
    threads: int
    gpu: Gpu | None = None
    threads_by: str | None = None

    def verdict(self) -> tuple[Mark, str]:
        """Whether it is bound as it should be ("" where there is nothing to bind to), and a text that says so."""
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
    local_rank: int = 0,
    sysfs: Path = SYSFS,
    cores: tuple[int, ...] | None = None,
    gpus: Sequence[Any] | None = None,
) -> Binding:
    """The binding of this process.

    Args:
        local_rank: number of this process on its host, and of its GPU.
        sysfs: where the kernel describes the machine.
        cores: numbers of the cores that this process may use; None: asked of the system.
        gpus: the GPUs' properties as PyTorch gives them; None: asked of PyTorch.
    """
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
    """Whether the threads of one host's processes fit its cores, and a text that says so.

    Where the user has set no number runs measure it, whatever torchrun has set; a number of the user's is judged.
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
    """[0, 1, 2, 5] as "0-2,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
