"""Times at which an answer was added, admitted and computed."""

import time
from dataclasses import dataclass, field


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
