"""Scheduling over several tensor groups of ranks, each with its own scheduler and blocks. Torch-free, as
`scheduler.py`."""

from dataclasses import dataclass, field

from expertmesh.engine.block_pool import BlockPool
from expertmesh.engine.request import FinishReason, Request, Sequence
from expertmesh.engine.scheduler import Counters, Scheduler, Step


@dataclass(frozen=True)
class JointStep(Step):
    """Step of all groups."""

    parts: tuple[Step, ...] = ()  # step of each group


@dataclass
class GroupScheduler:
    """Scheduler that assigns each request to the least loaded group; otherwise with the interface of `Scheduler`."""

    schedulers: list[Scheduler]
    _owner: dict[Request, Scheduler] = field(default_factory=dict)

    @property
    def pools(self) -> list[BlockPool]:
        """Block pool of each group."""
        return [one.pool for one in self.schedulers]

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks."""
        return [sequence for one in self.schedulers for sequence in one.running]

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences."""
        return [sequence for one in self.schedulers for sequence in one.waiting]

    @property
    def counters(self) -> Counters:
        """Counters summed over all groups."""
        return sum((one.counters for one in self.schedulers), Counters())

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return any(one.has_work for one in self.schedulers)

    def add(self, request: Request) -> None:
        """See `Scheduler.add`."""
        owner = min(self.schedulers, key=_tokens_to_do)
        owner.add(request)
        self._owner[request] = owner

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """See `Scheduler.finish`."""
        request = sequence.request
        if request in self._owner:
            self._owner[request].finish(sequence, reason)
            if request.is_finished:
                del self._owner[request]

    def schedule(self) -> JointStep:
        """See `Scheduler.schedule`."""
        parts = tuple(one.schedule() for one in self.schedulers)
        return JointStep(
            tuple(chunk for part in parts for chunk in part.chunks),
            preempted=tuple(sequence for part in parts for sequence in part.preempted),
            guessed={key: value for part in parts for key, value in part.guessed.items()},
            parts=parts,
        )

    def commit(self, step: Step, tokens: dict[Sequence, int]) -> None:
        """See `Scheduler.commit`."""
        assert isinstance(step, JointStep)
        for one, part in zip(self.schedulers, step.parts, strict=True):
            one.commit(part, tokens)

    def accept(self, sequence: Sequence, guessed: Sequence, token: int) -> bool:
        """See `Scheduler.accept`."""
        owner = self._owner.get(sequence.request)
        return owner is not None and owner.accept(sequence, guessed, token)

    def forget_prefixes(self) -> None:
        """See `Scheduler.forget_prefixes`."""
        for one in self.schedulers:
            one.forget_prefixes()


def _tokens_to_do(scheduler: Scheduler) -> int:
    """Approximate number of tokens left to compute, of prompts and answers."""
    return sum(
        len(one.request.prompt_ids) + one.request.max_tokens - one.num_computed
        for queue in (scheduler.waiting, scheduler.running)
        for one in queue
    )
