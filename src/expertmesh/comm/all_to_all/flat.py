"""All-to-all of token rows, straight from each rank to each other.

Ragged: every pair of ranks exchanges as many rows as it has, without padding; the numbers are exchanged once per
dispatch and copied to the host once. Fixed: every pair exchanges equally many rows, and the host never waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.comm.group import Pending, RankGroup, wait_for


@dataclass(frozen=True)
class Counts:
    """What this rank exchanges with each rank of a group.

    Attributes:
        send: rows to each rank.
        receive: rows from each rank.
        more: received sums of the further columns that were exchanged with the rows.
    """

    send: list[int]
    receive: list[int]
    more: list[int]

    def mirrored(self) -> "Counts":
        """The way back."""
        return Counts(self.receive, self.send, self.more)


def exchange_counts(counts_PC: Tensor, group: RankGroup, *, where: str) -> Counts:
    """Tell every rank how much it will receive.

    Args:
        counts_PC: (n, C) int64, row i for the group's i-th rank; the first column counts rows, the others anything
            that the receiver wants summed over the senders.
        group: of n ranks.
        where: layer and purpose.

    Returns:
        Numbers on the host. Waits for the device once.
    """
    counts_PC = counts_PC.contiguous()
    if group.size == 1:
        both = torch.stack((counts_PC, counts_PC))
    else:
        received_PC = torch.empty_like(counts_PC)
        num_bytes = counts_PC.nbytes * (group.size - 1) // group.size
        group.start(
            "all_to_all",
            f"{where}, counts",
            num_bytes,
            lambda pg: dist.all_to_all_single(received_PC, counts_PC, group=pg, async_op=True),
        ).wait()
        both = torch.stack((counts_PC, received_PC))
    send, receive = both.tolist()
    more = [sum(column) for column in list(zip(*receive, strict=True))[1:]]
    return Counts([row[0] for row in send], [row[0] for row in receive], more)


def start_all_to_all(
    x_RD: Tensor,
    send: Sequence[int] | None,
    receive: Sequence[int] | None,
    group: RankGroup,
    *,
    where: str,
) -> tuple[Tensor, Pending | None]:
    """Begin an all-to-all of rows; not seen by autograd.

    Args:
        x_RD: (sum of send, ...) rows, grouped by destination in the order of the group's ranks.
        send: rows for each rank; None: equally many for all, and the same number comes from each.
        receive: rows from each rank, or None.
        group: who takes part.
        where: layer and purpose.

    Returns:
        (sum of receive, ...) rows grouped by their origin, and what to wait for.
    """
    x_RD = x_RD.detach().contiguous()
    if group.size == 1:
        return x_RD, None
    if send is None or receive is None:
        out, to_others = torch.empty_like(x_RD), x_RD.shape[0] * (group.size - 1) // group.size
        splits: tuple[list[int] | None, list[int] | None] = None, None
    else:
        out = x_RD.new_empty(sum(receive), *x_RD.shape[1:])
        to_others = sum(send) - send[group.rank]
        splits = list(receive), list(send)
    row_bytes = x_RD[0].nbytes if x_RD.shape[0] else 0
    pending = group.start(
        "all_to_all",
        where,
        to_others * row_bytes,
        lambda pg: dist.all_to_all_single(out, x_RD, *splits, group=pg, async_op=True),
    )
    return out, pending


class _AllToAll(torch.autograd.Function):
    """The gradient takes the mirror way on the same group."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        send: Sequence[int] | None,
        receive: Sequence[int] | None,
        group: RankGroup,
        where: str,
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.where = send, receive, group, where
        out, pending = start_all_to_all(x_RD, send, receive, group, where=where)
        wait_for(pending)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        where = f"{ctx.where}, backward"
        out, pending = start_all_to_all(grad, ctx.receive, ctx.send, ctx.group, where=where)
        wait_for(pending)
        return out, None, None, None, None


def all_to_all(x_RD: Tensor, counts: Counts | None, group: RankGroup, *, where: str) -> Tensor:
    """Send rows to their ranks.

    Args:
        x_RD: rows (R, ...) of any dtype, grouped by destination in the order of the group's ranks.
        counts: rows to and from each rank, of `exchange_counts`; None: R / n to and from each of the n ranks.
        group: who takes part; all of its ranks must call.
        where: layer and purpose, for the byte counter and for errors.

    Returns:
        The rows received, grouped by origin. Differentiable once. Waits for the ranks, but on a GPU not on the host.
    """
    if group.size == 1:
        return x_RD
    send, receive = (None, None) if counts is None else (counts.send, counts.receive)
    out: Tensor = _AllToAll.apply(x_RD, send, receive, group, where)
    return out
