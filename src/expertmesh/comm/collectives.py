"""Collectives with gradients.

Every rank has its own loss, and the total loss is their sum. So the gradient of an all-gather is a reduce-scatter, the
gradient of a reduce-scatter is an all-gather, and the gradient of an all-reduce is an all-reduce.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.comm.async_collective import AsyncTensor
from expertmesh.comm.group import Pending, RankGroup, wait

# Newer versions of torch rename these functions and warn about the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FEW_BYTES = 1 << 14
"""Largest total size over all ranks, in bytes, at which an all-reduce on CPUs is an all-to-all with local sums."""


def start_all_gather(x: Tensor, group: RankGroup, *, where: str) -> tuple[Tensor, Pending | None]:
    """Start an all-gather of equally shaped tensors; not seen by autograd.

    Returns:
        (n, ...) in the order of the group's ranks, and the handle to wait for before using it (None: no wait).
    """
    x = x.detach().contiguous()
    if group.size == 1:
        return x[None], None
    out = x.new_empty(group.size * x.numel())
    num_bytes = (group.size - 1) * x.nbytes
    pending = group.start(
        "all_gather",
        where,
        num_bytes,
        lambda pg: _gather_into(out, x.view(-1), group=pg, async_op=True),
    )
    return out.view(group.size, *x.shape), pending


def start_reduce_scatter(x: Tensor, group: RankGroup, *, where: str) -> tuple[Tensor, Pending | None]:
    """Start a reduce-scatter: tensors are summed over ranks and each rank keeps its block; not seen by autograd.

    Args:
        x: (n, ...), block i for the i-th rank of the group.

    Returns:
        (...) this rank's sum, and the handle to wait for before using it.
    """
    x = x.detach().contiguous()
    if group.size == 1:
        return x[0], None
    out = x.new_empty(x.shape[1:])
    num_bytes = (group.size - 1) * out.nbytes
    pending = group.start(
        "reduce_scatter",
        where,
        num_bytes,
        lambda pg: _scatter_sum(out.view(-1), x.view(-1), group=pg, async_op=True),
    )
    return out, pending


def start_all_reduce(x: Tensor, group: RankGroup, *, where: str) -> Pending | None:
    """Start an in-place all-reduce (sum) of a contiguous tensor; not seen by autograd.

    Small tensors on CPUs are exchanged by all-to-all and summed on every rank: gloo's own all-reduce takes two to five
    times the CPU time (docs/log.md).
    """
    if group.size == 1:
        return None
    if x.device.type == "cpu" and group.size * x.nbytes <= FEW_BYTES:
        out_N = x.detach().view(-1)
        copies = out_N[None].repeat(group.size, 1)
        part_PN = torch.empty_like(copies)
        return group.start(
            "all_reduce",
            where,
            (group.size - 1) * x.nbytes,
            lambda pg: dist.all_to_all_single(part_PN, copies, group=pg, async_op=True),
            then=lambda: torch.sum(part_PN, 0, dtype=x.dtype, out=out_N),
        )
    num_bytes = 2 * (group.size - 1) * x.nbytes // group.size
    return group.start(
        "all_reduce",
        where,
        num_bytes,
        lambda pg: dist.all_reduce(x, group=pg, async_op=True),
    )


def async_all_gather(x: Tensor, group: RankGroup, *, where: str) -> AsyncTensor:
    """Start the all-gather of `all_gather`; its `finish` returns the result."""
    return AsyncTensor(
        x,
        lambda t: start_all_gather(t, group, where=where),
        lambda grad: start_reduce_scatter(grad, group, where=f"{where}, backward"),
    )


in_flight_all_gather = async_all_gather
"""Former name of `async_all_gather`, which external exchanges may import."""


def all_gather(x: Tensor, group: RankGroup, *, where: str) -> Tensor:
    """Stack the tensors of all ranks, equal in shape.

    Returns:
        (n, ...). Differentiable once: the gradient is reduce-scattered over the same group. Waits for the ranks.
    """
    return async_all_gather(x, group, where=where).finish()


def reduce_scatter(x: Tensor, group: RankGroup, *, where: str) -> Tensor:
    """Sum (n, ...) over ranks; each rank keeps its block (...). Differentiable once: the gradient is all-gathered."""
    return AsyncTensor(
        x,
        lambda t: start_reduce_scatter(t, group, where=where),
        lambda grad: start_all_gather(grad, group, where=f"{where}, backward"),
    ).finish()


def all_reduce(x: Tensor, group: RankGroup, *, where: str) -> Tensor:
    """Sum over ranks; not in place. Differentiable once: the gradients of the ranks' losses are summed too."""
    if group.size == 1:
        return x

    def summed(t: Tensor, where: str = where) -> tuple[Tensor, Pending | None]:
        total = t.detach().clone(memory_format=torch.contiguous_format)
        return total, start_all_reduce(total, group, where=where)

    return AsyncTensor(x, summed, lambda grad: summed(grad, f"{where}, backward")).finish()


def gather_to_first(x: Tensor, group: RankGroup, *, where: str) -> list[Tensor] | None:
    """Gather the equally shaped tensors of all ranks on the group's first rank; returns None on the others. Not seen by
    autograd."""
    parts = [torch.empty_like(x) for _ in range(group.size)] if group.rank == 0 else None
    wait(
        group.start(
            "gather",
            where,
            x.nbytes if group.rank else 0,
            lambda pg: dist.gather(x, parts, group=pg, group_dst=0, async_op=True),
        )
    )
    return parts


def broadcast_(x: Tensor, group: RankGroup, *, where: str) -> None:
    """Broadcast the tensor of the group's first rank to all, in place. Not seen by autograd.

    Args:
        x: contiguous, equal in shape and dtype on all ranks.
    """
    if group.size == 1:
        return
    wait(
        group.start(
            "broadcast",
            where,
            x.nbytes if group.rank == 0 else 0,
            lambda pg: dist.broadcast(x, group_src=0, group=pg, async_op=True),
        )
    )
