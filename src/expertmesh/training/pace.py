"""Warning about a step that takes much longer than the others, with the likely cause from the system's counters."""

import os
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from expertmesh.comm.cores import allowed_cores

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SLOW = 5.0
"""A step is slow if it takes more than this times the median."""

_FEWEST = 8  # steps needed for a median; the first step is not counted
_MOST = 101
_LEAST_S = 0.1  # shortest pause that is reported
_BUSY = 0.5


class SystemCounts(NamedTuple):
    """Counters of the system for this process."""

    cpu_s: float  # processor time of all threads
    reads: int  # major page faults: pages read back from disk
    pushed: int  # involuntary context switches


def system_counts() -> SystemCounts:
    """Current counters."""
    if resource is None:
        return SystemCounts(time.process_time(), 0, 0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return SystemCounts(usage.ru_utime + usage.ru_stime, usage.ru_majflt, usage.ru_nivcsw)


def system_load() -> float:
    """Mean number of running threads in the last minute (load average); 0 if unavailable."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


class Pace:
    """Watches the seconds of steps, and reports once."""

    def __init__(
        self,
        *,
        has_gpu: bool = False,  # whether a GPU computes
        num_ranks: int = 1,
        counts: Callable[[], SystemCounts] = system_counts,  # returns the system's counters
        load: Callable[[], float] = system_load,  # returns the system's load
    ) -> None:
        self._counts, self._load = counts, load
        self._has_gpu, self._num_ranks = has_gpu, num_ranks
        self._seconds: deque[float] = deque(maxlen=_MOST)
        self._num_steps = 0
        self._has_spoken = False
        self._before = counts()

    def begin(self) -> None:
        """Record that a step begins."""
        if not self._has_spoken:
            self._before = self._counts()

    def end(self, seconds: float) -> str | None:
        """Record the seconds of a step; returns a message about the first slow one, else None."""
        self._num_steps += 1
        if self._has_spoken or self._num_steps == 1:
            return None
        usual = median(self._seconds) if len(self._seconds) >= _FEWEST else None
        self._seconds.append(seconds)
        if usual is None or seconds <= SLOW * usual or seconds < usual + _LEAST_S:
            return None
        self._has_spoken = True
        now = self._counts()
        before = self._before
        spent = SystemCounts(now.cpu_s - before.cpu_s, now.reads - before.reads, now.pushed - before.pushed)
        return (
            f"took {seconds:.3g} s, {seconds / usual:.0f} times the median of {usual:.3g} s: "
            f"{self._cause(seconds, spent)}"
            " (said once)"
        )

    def _cause(self, seconds: float, spent: SystemCounts) -> str:
        if spent.reads > 100:
            return (
                f"{spent.reads:,} pages were read back from the disk; there is too little memory for all that runs here"
            )
        load, cores = self._load(), len(allowed_cores())
        others = f"(load {load:.1f} on {cores} cores)"
        if not self._has_gpu and (load > cores + _BUSY or spent.pushed > 20 * seconds):
            return f"other programs use the processor {others}; end them, or try a smaller parallel.num_threads"
        if spent.cpu_s < _BUSY * seconds:
            if self._num_ranks > 1:
                return "this rank waited; another rank was late, or the network"
            return (
                "this process waited: for the GPU, a disk, or a limit of its container"
                if self._has_gpu
                else ("this process waited: for a disk, or for a limit of its container")
            )
        return "this process computed all the while: a new size was prepared, or the batch was larger"
