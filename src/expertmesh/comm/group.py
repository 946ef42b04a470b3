"""A process group with what its users need to know: who is in it, what it moved, and who failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from expertmesh.errors import CollectiveError


@dataclass(frozen=True)
class Transfer:
    """One collective of one rank.

    Attributes:
        collective: all_gather, reduce_scatter, all_reduce or all_to_all.
        where: what it was for: a layer and a purpose.
        num_bytes: payload that this rank hands to other ranks when each block goes straight to its receiver:
            (n - 1) shards for all_gather and reduce_scatter over n ranks, twice (n - 1) / n of the tensor for
            all_reduce ((n - 1) times a small one on CPUs), the rows for other ranks for all_to_all.
    """

    collective: str
    where: str
    num_bytes: int


class TransferLog:
    """Transfers while it is open."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def num_bytes(self, *, collective: str | None = None, where: str = "") -> int:
        """Bytes of the transfers of one kind (None: all) whose `where` contains a text."""
        return sum(
            t.num_bytes
            for t in self.transfers
            if collective in (None, t.collective) and where in t.where
        )


class Traffic:
    """Tells every open log of each transfer. One per `World`; without an open log it costs one test."""

    def __init__(self) -> None:
        self._open: list[TransferLog] = []

    @contextmanager
    def logged(self) -> Iterator[TransferLog]:
        """Log all transfers, those of backward passes included, until the context ends."""
        log = TransferLog()
        self._open.append(log)
        try:
            yield log
        finally:
            # By identity: two empty logs are not the same log.
            self._open = [other for other in self._open if other is not log]

    def add(self, collective: str, where: str, num_bytes: int) -> None:
        """Record one transfer."""
        for log in self._open:
            log.transfers.append(Transfer(collective, where, num_bytes))


class Awaited(Protocol):
    """What torch has under way."""

    def wait(self) -> object:
        """Wait for it.

        Raises:
            RuntimeError: it failed or timed out.
        """


class Pending:
    """A collective under way. Its tensors may be used after `wait`."""

    def __init__(
        self,
        work: Awaited | None,
        explain: Callable[[BaseException], CollectiveError],
        then: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._explain, self._then = work, explain, then

    def wait(self) -> None:
        """Wait for it (on a GPU: let the current stream wait). May be called again.

        Raises:
            CollectiveError: it failed or timed out.
        """
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
    """Wait for a collective; None is one that had nothing to do.

    Raises:
        CollectiveError: it failed or timed out.
    """
    if pending is not None:
        pending.wait()


class RankGroup:
    """Ranks that talk to one another.

    Args:
        process_group: of torch; None for a rank alone among others, which never communicates.
        ranks: numbers in the default group of its members, in the order of the process group.
        rank: this rank's place among them.
        name: for error messages.
        timeout_s: of every collective on it.
        traffic: is told of every collective.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        ranks: tuple[int, ...],
        rank: int,
        name: str,
        timeout_s: float,
        traffic: Traffic,
    ) -> None:
        self.process_group, self.ranks, self.rank = process_group, ranks, rank
        self.name, self.timeout_s, self.traffic = name, timeout_s, traffic

    def __deepcopy__(self, memo: dict[int, object]) -> "RankGroup":
        """The same group: copies of a module talk to the same ranks."""
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def start(
        self,
        collective: str,
        where: str,
        num_bytes: int,
        launch: Callable[[dist.ProcessGroup], Awaited | None],
        then: Callable[[], object] | None = None,
    ) -> Pending:
        """Launch an asynchronous collective of torch and record it.

        Args:
            collective: its kind, see `Transfer`.
            where: layer and purpose, for the log and for errors.
            num_bytes: see `Transfer`.
            launch: calls torch with this group.
            then: what is left to do on this rank when the collective is done; the wait does it.

        Raises:
            CollectiveError: it failed at once.
        """
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
