"""Early ends of a run that its configuration asks for: a time limit (`max_time`), or no better evaluation
(`patience`)."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from expertmesh.config.run import TrainConfig
from expertmesh.errors import ConfigError

EarlyEnd = Literal["max_time", "patience"]
"""Option that ended a run."""


def more_is_better(measure: str) -> bool:
    """Whether a larger value of a measure of evaluations is the better one: accuracies and rewards, no losses."""
    return measure.startswith(("accuracy", "reward")) or measure.endswith(("accuracy", "reward"))


class Ends:
    """Watches the clock and the evaluations of one call of `train`."""

    def __init__(self, config: TrainConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock, self._began = config, clock, clock()
        self._slowest_step_s, self._slowest_save_s = 0.0, math.nan
        self._best, self._worse = math.inf, 0

    @property
    def waits_for_save(self) -> bool:
        """Whether the next save is waited for, because the time of a save is unknown."""
        return self._config.max_time is not None and math.isnan(self._slowest_save_s)

    @property
    def best_text(self) -> str:
        """The best value so far, in words."""
        name = self._config.best_by
        if more_is_better(name):
            return f"validation {name} above {-self._best:.4f}"
        return f"validation {name} below {self._best:.4f}"

    def badness(self, found: Mapping[str, float]) -> float:
        """Measure of an evaluation by which checkpoints are compared (`best_by`), with its sign changed where more is
        better."""
        name = self._config.best_by
        if name not in found:
            known = f"known: {', '.join(found)}"
            raise ConfigError("train.best_by", name, "is no measure of this run", known)
        return -found[name] if more_is_better(name) else found[name]

    def stepped(self, seconds: float) -> None:
        """Record the seconds of a step."""
        self._slowest_step_s = max(self._slowest_step_s, seconds)

    def saved(self, seconds: float) -> None:
        """Record the seconds of a complete save."""
        self._slowest_save_s = max(seconds, 0.0 if math.isnan(self._slowest_save_s) else self._slowest_save_s)

    def heard(self, losses: Iterable[float]) -> None:
        """Record the losses of evaluations, or other values of which less is better; a non-finite one is never an
        improvement."""
        for loss in losses:
            is_better = loss < self._best
            self._best = loss if is_better else self._best
            self._worse = 0 if is_better else self._worse + 1

    def is_late(self) -> bool:
        """Whether another step and save, as long as the longest so far, would exceed `max_time`."""
        if self._config.max_time is None:
            return False
        save_s = self._slowest_step_s if math.isnan(self._slowest_save_s) else self._slowest_save_s
        then = self._clock() - self._began + self._slowest_step_s + save_s
        return then > self._config.max_time

    def has_no_patience(self) -> bool:
        """Whether none of the last `patience` evaluations improved on the best."""
        patience = self._config.patience
        return patience is not None and self._worse >= patience
