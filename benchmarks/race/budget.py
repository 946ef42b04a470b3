"""Seconds that a call may take."""

import time
from collections.abc import Callable


class Budget:
    """Seconds that may be spent in all: nothing new is begun that would not fit."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._now, self._began = seconds, now, now()

    @property
    def spent_s(self) -> float:
        return self._now() - self._began

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s

    def allows(self, seconds: float) -> bool:
        """Whether something that takes this long may begin."""
        return self.left_s >= seconds
