"""A process group with its ranks, a log of transferred bytes, and errors that name the failed collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from expertmesh.errors import CollectiveError


@dataclass(frozen=True)
class Transfer:
    """Record of one collective on one rank.

    Attributes:
        num_bytes: payload that this rank hands to other ranks when each block goes straight to its receiver: (n - 1)
            shards for all_gather and reduce_scatter over n ranks, twice (n - 1) / n of the tensor for all_reduce ((n -
            1) times a small one on CPUs), the rows for other ranks for all_to_all, the tensor for gather (0 on the
            first rank) and for broadcast (0 on the others).
    """

    collective: str  # all_gather, reduce_scatter, all_reduce, all_to_all, gather or broadcast
    where: str  # layer and purpose of the collective
    num_bytes: int


class TransferLog:
    """Transfers recorded while the log is open."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def num_bytes(self, *, collective: str | None = None, where: str = "") -> int:
        """Sum the bytes of transfers of one kind (None: all) whose `where` contains a text."""
        return sum(t.num_bytes for t in self.transfers if collective in (None, t.collective) and where in t.where)


class Traffic:
    """Records every transfer in all open logs. One per `World`; without an open log it costs one test."""

    def __init__(self) -> None:
        self._open: list[TransferLog] = []

    @contextmanager
    def logged(self) -> Iterator[TransferLog]:
        """Log all transfers, including backward passes, until the context ends."""
        log = TransferLog()
        self._open.append(log)
        try:
            yield log
        finally:
            # Compared by identity, because two empty logs are equal.
            self._open = [other for other in self._open if other is not log]

    def add(self, collective: str, where: str, num_bytes: int) -> None:
        """Record one transfer."""
        for log in self._open:
            log.transfers.append(Transfer(collective, where, num_bytes))


class Awaited(Protocol):
    """Protocol of torch's handle of a collective in flight."""

    def wait(self) -> object:
        """Wait for the collective."""


class Pending:
    """A collective in flight. Its tensors may be used after `wait`."""

    def __init__(
        self,
        work: Awaited | None,
        explain: Callable[[BaseException], CollectiveError],
        then: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._explain, self._then = work, explain, then

    def wait(self) -> None:
        """Wait for the collective (on a GPU the current stream waits). May be called again."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explain(error) from error
        if self._then is not None:
            self._then()


def wait(pending: Pending | None) -> None:
    """Wait for a collective; None needs no wait."""
    if pending is not None:
        pending.wait()


class RankGroup:
    """A process group with its ranks; starts and logs its collectives.

    Args:
        process_group: torch's process group; None for a single rank, which never communicates.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        ranks: tuple[int, ...],  # the members' ranks in the default group, in the order of the process group
        rank: int,  # index of this rank in the group
        name: str,  # for error messages
        timeout_s: float,  # timeout of every collective on the group
        traffic: Traffic,  # records every collective
    ) -> None:
        self.process_group, self.ranks, self.rank = process_group, ranks, rank
        self.name, self.timeout_s, self.traffic = name, timeout_s, traffic

    def __deepcopy__(self, memo: dict[int, object]) -> "RankGroup":
        """Return the group itself: copies of a module talk to the same ranks."""
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def start(
        self,
        collective: str,  # kind of the collective, see `Transfer`
        where: str,  # layer and purpose, for the log and for errors
        num_bytes: int,  # see `Transfer`
        launch: Callable[[dist.ProcessGroup], Awaited | None],  # calls torch with this group
        then: Callable[[], object] | None = None,  # work on this rank after the collective is done; `wait` calls it
    ) -> Pending:
        """Launch an asynchronous collective of torch and record it."""
        assert self.process_group is not None, "a group of one rank has nobody to talk to"

        def explain(error: BaseException) -> CollectiveError:
            reason = str(error).strip().partition("\n")[0]
            return CollectiveError(
                f"rank {self.ranks[self.rank]}: {collective} of {where} over {self.name} (ranks "
                f"{', '.join(map(str, self.ranks))}) failed or took over {self.timeout_s:g} s: {reason}"
            )

        self.traffic.add(collective, where, num_bytes)
        try:
            work = launch(self.process_group)
        except RuntimeError as error:
            raise explain(error) from error
        return Pending(work, explain, then)
