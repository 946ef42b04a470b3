"""The one clock of all benchmarks, and the order of their rounds.

On a GPU it is CUDA events around each part with a cold L2; elsewhere wall time, or CPU time of one thread: on a machine
shared with other work only the second one means something.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Clock = Literal["wall", "cpu"]
"""Of what is computed on CPUs."""
Part = Callable[[], object]

HEAD_START_CYCLES = 4_000_000
"""About two milliseconds that the device waits before a part, so that the host has launched most of it in time."""
_FLUSHED_L2 = 4
"""The buffer written between parts is this many times the L2."""


@dataclass
class Sample:
    """Seconds of one part over the rounds: on the device, and what the host took to launch it."""

    device_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.device_s)

    @property
    def spread(self) -> float:
        """Largest minus smallest, relative to the median."""
        return (max(self.device_s) - min(self.device_s)) / self.median_s

    @property
    def host_median_s(self) -> float:
        return statistics.median(self.host_s)


class Stopwatch:
    """Times parts one after another on one device.

    Args:
        device: cpu, cuda or cuda:N.
        clock: of a CPU.

    Raises:
        ValueError: clock is cpu, and there are several threads.
    """

    def __init__(self, device: str = "cpu", clock: Clock = "wall") -> None:
        self.is_cuda, self.cuda = device.startswith("cuda"), torch.cuda
        if clock == "cpu" and torch.get_num_threads() != 1:
            raise ValueError("clock is cpu, which counts one thread; use it with --threads 1")
        self._now = time.perf_counter if clock == "wall" else time.thread_time
        if self.is_cuda:
            size = torch.cuda.get_device_properties(device).L2_cache_size * _FLUSHED_L2
            self._junk = torch.empty(size, dtype=torch.int8, device=device)

    def times(self, parts: Sequence[Part]) -> list[tuple[float, float]]:
        """(Device, host) seconds of each part, run in order.

        On a GPU each part begins with a cold L2 and after a wait on the device, so that what the host takes for a
        launch does not count unless the part waits for the device itself. Waits for the device once, at the end.
        """
        if not self.is_cuda:
            return [self._alone(part) for part in parts]
        marks = []
        for part in parts:
            self.cuda._sleep(HEAD_START_CYCLES)
            self._junk.zero_()
            start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            began = time.perf_counter()
            part()
            host_s = time.perf_counter() - began
            end.record()
            marks.append((start, end, host_s))
        self.cuda.synchronize()
        return [(start.elapsed_time(end) / 1e3, host_s) for start, end, host_s in marks]

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def _alone(self, part: Part) -> tuple[float, float]:
        began = self._now()
        part()
        seconds = self._now() - began
        return seconds, seconds


@dataclass(frozen=True)
class Entry:
    """Something to time.

    Attributes:
        name: as it appears in tables.
        prepare: what comes before and is not timed (gradients set to None, the next batch); gets the round's number.
        parts: what is timed, by name, in order.
        finish: what comes behind them, not timed.
        is_slow: whether it is timed once, in the last round, without warm-up (baselines that take minutes).
    """

    name: str
    prepare: Callable[[int], object]
    parts: dict[str, Part]
    finish: Callable[[], object] = lambda: None
    is_slow: bool = False


def interleaved(
    entries: Sequence[Entry],
    stopwatch: Stopwatch,
    *,
    rounds: int,
    warmup: int = 1,
    until: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, Sample]]:
    """Time all entries in turn, round by round, another one first in every round.

    Args:
        entries: at least one.
        stopwatch: of the device.
        rounds: timed rounds.
        warmup: rounds before, not timed.
        until: asked after every timed round; True ends the race early.

    Returns:
        Samples by entry and part.
    """
    samples = {e.name: {part: Sample() for part in e.parts} for e in entries}
    for number in range(warmup + rounds):
        first = number % len(entries)
        for entry in (*entries[first:], *entries[:first]):
            if entry.is_slow and number < warmup + rounds - 1:
                continue
            entry.prepare(number)
            seconds = stopwatch.times(list(entry.parts.values()))
            entry.finish()
            for name, (device_s, host_s) in zip(entry.parts, seconds, strict=True):
                if number >= warmup:
                    samples[entry.name][name].device_s.append(device_s)
                    samples[entry.name][name].host_s.append(host_s)
        if number >= warmup and until():
            break
    return samples
