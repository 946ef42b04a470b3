"""Times at which an answer was added, admitted and computed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from expertmesh.engine.request import Sequence
from expertmesh.engine.scheduler import Step


@dataclass
class Timing:
    """Times of an answer in seconds of `time.perf_counter`; None: not reached yet.

    Attributes:
        admitted: the first step with its tokens began; for an answer that shares another's prompt, the first step that
            sampled a token for it.

    Example:
        >>> timing = Timing(added=1.0)
        >>> timing.drew(3.0), timing.first_token, timing.admitted
        (None, 3.0, None)
    """

    added: float = field(default_factory=time.perf_counter)  # its request was added
    admitted: float | None = None
    first_token: float | None = None  # its first token was sampled
    last_token: float | None = None  # its latest token was sampled
    num_preemptions: int = 0

    def drew(self, now: float) -> None:
        """Record a sampled token."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now


class Timed(Protocol):
    """Object with a timing."""

    timing: Timing


def note_begin(step: Step, answers: Mapping[Sequence, Timed], now: float) -> None:
    """Record the start of a step: its sequences are admitted, preempted ones are counted."""
    for chunk in step.chunks:
        for sequence in (chunk.sequence, *chunk.samples):
            if sequence in answers and answers[sequence].timing.admitted is None:
                answers[sequence].timing.admitted = now
    for sequence in step.preempted:
        answers[sequence].timing.num_preemptions += 1
