"""When an answer was asked for, begun and computed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from expertmesh.engine.request import Sequence
from expertmesh.engine.scheduler import Step


@dataclass
class Timing:
    """Times of one answer in seconds of `time.perf_counter`; None: it has not come so far.

    Attributes:
        added: its request was taken.
        admitted: the first step with some of its tokens began; of an answer that goes on from another one's prompt, the first step
            that drew a token for it.
        first_token: its first token was drawn.
        last_token: its last one so far was.
        num_preemptions: so often it gave its blocks back.

    Example:
        >>> timing = Timing(added=1.0)
        >>> timing.drew(3.0), timing.first_token, timing.admitted
        (None, 3.0, None)
    """

    added: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_preemptions: int = 0

    def drew(self, now: float) -> None:
        """A token was drawn."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now


class Timed(Protocol):
    """What has a timing."""

    timing: Timing


def note_begin(step: Step, answers: Mapping[Sequence, Timed], now: float) -> None:
    """A step begins: who is in it has been admitted, and who gave way to it was preempted.

    Args:
        step: as it was planned.
        answers: by sequence; guessed sequences have none.
        now: seconds.
    """
    for chunk in step.chunks:
        for sequence in (chunk.sequence, *chunk.samples):
            if sequence in answers and answers[sequence].timing.admitted is None:
                answers[sequence].timing.admitted = now
    for sequence in step.preempted:
        answers[sequence].timing.num_preemptions += 1
