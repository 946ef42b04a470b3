"""All-to-all of token rows, sent directly between each pair of ranks.

Ragged: pairs of ranks exchange different numbers of rows, without padding. Row counts are exchanged once per dispatch
and copied to the host once. Fixed: every pair exchanges equally many rows, and the host never waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from expertmesh.comm.all_to_all.payload import packed, unpacked
from expertmesh.comm.async_collective import AsyncTensor
from expertmesh.comm.group import Awaited, Pending, RankGroup, wait
from expertmesh.comm.host_copy import beside, on_host
from expertmesh.config.dispatch_options import DispatchDtype


@dataclass(frozen=True)
class Counts:
    """Row counts that this rank sends to and receives from each rank of a group."""

    send: list[int]  # rows to each rank
    receive: list[int]  # rows from each rank

    def mirrored(self) -> "Counts":
        """Counts of the return path: send and receive exchanged."""
        return Counts(self.receive, self.send)


class AsyncCounts:
    """Exchange of row counts in flight between the ranks of a group.

    Args:
        counts_PC: (n, C) int64, row i for the group's i-th rank; columns are independent counts.
    """

    def __init__(self, counts_PC: Tensor, group: RankGroup, *, where: str) -> None:
        self._sent_PC = counts_PC.contiguous()
        self._received_PC, self._pending = start_all_to_all(self._sent_PC, None, None, group, where=f"{where}, counts")
        self._counts: list[Counts] | None = None
        self._numbers: Callable[[], list[Any]] | None = None
        if self._sent_PC.is_cuda and self._pending is not None:
            # On a stream of its own, so that the host does not wait for computation queued meanwhile, such as the
            # router's losses.
            with beside(self._sent_PC.device):
                self._numbers = self._begin_to_copy()

    def _begin_to_copy(self) -> Callable[[], list[Any]]:
        wait(self._pending)
        return on_host(torch.stack((self._sent_PC.t(), self._received_PC.t())))

    def finish(self) -> list[Counts]:
        """Return the counts of each column on the host; the first call waits for the ranks."""
        if self._counts is None:
            both_2CP = (self._numbers or self._begin_to_copy())()
            self._counts = [Counts(*column) for column in zip(*both_2CP, strict=True)]
        return self._counts


def start_all_to_all(
    x_RD: Tensor,  # (sum of send, ...) rows, grouped by destination in the order of the group's ranks
    send: Sequence[int] | None,  # number of rows for each rank; None: equal numbers to and from all ranks
    receive: Sequence[int] | None,  # number of rows from each rank, or None
    group: RankGroup,  # the ranks that take part
    *,
    where: str,  # layer and purpose, for the byte counter and for errors
) -> tuple[Tensor, Pending | None]:
    """Start an all-to-all of rows; not seen by autograd.

    Returns:
        (sum of receive, ...) rows grouped by source rank, and the handle to wait for.
    """
    x_RD = x_RD.detach().contiguous()
    if group.size == 1:
        return x_RD, None
    row_bytes = x_RD[0].nbytes if x_RD.shape[0] else 0
    if send is None or receive is None:
        out, to_others = torch.empty_like(x_RD), x_RD.shape[0] * (group.size - 1) // group.size
    else:
        out = x_RD.new_empty(sum(receive), *x_RD.shape[1:])
        to_others = sum(send) - send[group.rank]

    def launch(pg: dist.ProcessGroup) -> Awaited | None:
        if send is None or receive is None:
            result: Awaited | None = dist.all_to_all_single(out, x_RD, group=pg, async_op=True)
            return result
        if x_RD.device.type == "cpu":
            return _Messages(out.split(list(receive)), x_RD.split(list(send)), group.rank, pg)
        splits = list(receive), list(send)
        other: Awaited | None = dist.all_to_all_single(out, x_RD, *splits, group=pg, async_op=True)
        return other

    return out, group.start("all_to_all", where, to_others * row_bytes, launch)


class _Messages:
    """All-to-all as point-to-point messages between pairs of ranks that have rows; all receives are posted before any
    send.

    Gloo's own all-to-all posts the receive from a rank after the send to it. If one rank of a pair is early, the
    other's rows wait until the early rank's rows have arrived, so the two directions of a link are used one after the
    other (docs/log.md).
    """

    def __init__(
        self,
        into: Sequence[Tensor],
        rows: Sequence[Tensor],
        here: int,
        process_group: dist.ProcessGroup,
    ) -> None:
        n = len(into)
        # starting with the neighbours, so that not all ranks begin with the same one
        others = [(here + i) % n for i in range(1, n)]
        self._works = [
            dist.irecv(into[other], group=process_group, group_src=other)
            for other in reversed(others)
            if into[other].numel()
        ]
        self._works += [
            dist.isend(rows[other], group=process_group, group_dst=other) for other in others if rows[other].numel()
        ]
        into[here].copy_(rows[here])

    def wait(self) -> None:
        """Wait for all messages."""
        for work in self._works:
            if work is not None:
                work.wait()


def async_all_to_all(
    x_RD: Tensor,
    counts: Counts | None,
    group: RankGroup,
    *,
    where: str,
    payload: DispatchDtype = "same",
) -> AsyncTensor:
    """Start sending rows to their ranks; differentiable.

    Args:
        x_RD: rows (R, ...) of any dtype, grouped by destination in the order of the group's ranks.
        counts: rows to and from each rank, of `AsyncCounts`; None: R / n to and from each of the n ranks.
        group: the ranks that take part; all of them must call.
        where: layer and purpose, for the byte counter and for errors.
        payload: dtype in which rows are sent. In 8 bits they arrive rounded; the gradient ignores the rounding.

    Returns:
        The rows in flight, which arrive grouped by source rank. The gradient is sent back on the same group.
    """
    send, receive = (None, None) if counts is None else (counts.send, counts.receive)
    if payload != "same" and group.size > 1:
        dim, dtype = (
            x_RD.shape[1],
            x_RD.dtype,
        )  # not the rows themselves, which the backward does not need
        return AsyncTensor(
            x_RD,
            lambda rows: start_all_to_all(packed(rows, payload), send, receive, group, where=where),
            lambda grad: start_all_to_all(grad, receive, send, group, where=f"{where}, backward"),
            lambda arrived: unpacked(arrived, dim, dtype, payload),
        )
    return AsyncTensor(
        x_RD,
        lambda rows: start_all_to_all(rows, send, receive, group, where=where),
        lambda grad: start_all_to_all(grad, receive, send, group, where=f"{where}, backward"),
    )


in_flight_all_to_all = async_all_to_all
"""Former name of `async_all_to_all`, which external exchanges may import."""
