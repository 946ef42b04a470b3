"""One shape of the race: contenders checked at full size, then timed side by side, whole layers and experts alone."""

import gc
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from benchmarks.clock import Entry, Sample, Stopwatch, interleaved
from benchmarks.race.check import FAR_OFF, check
from benchmarks.race.contenders import OURS, Inputs, Racer, WeightSet, field_of
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import PHASES, RaceShape, chosen
from benchmarks.race.verdicts import LIGER
from benchmarks.race.warm import tune_quickly

_WARMUP = 2
_LOST_GPU = 70
"""Exit code of a process that can use its GPU no longer."""


class WrongError(Exception):
    """Our own results are wrong; no time counts."""


class _Race:
    """What a shape's race has found, and who is being tried: a contender that fails costs itself only.

    One that raises leaves the race. One with which the process dies, hangs, or loses the GPU is left out of the next
    attempt.
    """

    def __init__(self, keep: Keep, shape: str, device: str) -> None:
        before = keep.before or {}
        self.keep, self.shape, self.device = keep, shape, device
        self.rows: list[dict[str, Any]] = before.get("rows", [])
        self.experts: list[dict[str, Any]] = []
        self.missing: list[str] = before.get("missing", [])
        self.out: dict[str, str] = before.get("out", {})
        self.now = before.get("trying")
        if self.now == OURS:
            raise WrongError(f"{shape}: ours crashed or hung; no time counts")
        if self.now is not None:
            self.out.setdefault(self.now, self._note("crashed or hung"))

    def found(self) -> dict[str, Any]:
        """The result, as far as there is one."""
        notes = [*self.missing, *self.out.values()]
        return {"rows": self.rows, "experts": self.experts, "notes": notes}

    def begin(self, name: str | None) -> None:
        """Note what was found, and who is tried from now on; None: nobody."""
        self.now = name
        self.keep(self.found() | {"missing": self.missing, "out": self.out, "trying": name})

    def fail(self, error: Exception) -> None:
        """Take who is being tried out of the race; ends this process where the GPU is lost with it.

        Raises:
            WrongError: it is ours.
        """
        assert self.now is not None
        if self.now == OURS:
            raise WrongError(f"{self.shape}: {error}; no time counts") from error
        self.out[self.now] = self._note(f"{type(error).__name__}: {str(error)[:300]}")
        self.begin(self.now)
        release(self.device)

    def _note(self, why: str) -> str:
        return f"{'Experts alone' if self.rows else 'Out of the race'}: {self.now}: {why}."

    def timed(
        self,
        racers: list[Racer],
        stopwatch: Stopwatch,
        rounds: int,
        entries_of: Callable[[Racer], list[Entry]],
    ) -> dict[str, dict[str, Sample]]:
        """Samples by racer and phase of all who last; after a failure the others begin again."""
        while True:
            ready = [racer for racer in racers if racer.name not in self.out]
            phases = [self._noted(entry, r.name) for r in ready for entry in entries_of(r)]
            try:
                samples = interleaved(phases, stopwatch, rounds=rounds, warmup=_WARMUP)
                return {r.name: {**samples[r.name], **samples[f"{r.name}, both"]} for r in ready}
            except Exception as error:
                self.fail(error)

    def _noted(self, entry: Entry, name: str) -> Entry:
        def prepare(number: int) -> None:
            self.begin(name)
            entry.prepare(number)

        return replace(entry, prepare=prepare)


def race_shape(
    keep: Keep,
    *,
    shape: str,
    device: str,
    tiny: bool = False,
    rounds: int = 15,
    peers: tuple[str, ...] = (),
    checked: Callable[..., float] = check,
) -> dict[str, Any]:
    """A part: check all contenders of a shape, then time those who are right.

    Args:
        keep: of the part. After a crash, whoever was being tried then is left out, and what was timed stands.
        shape: its name.
        device: cuda, or cpu with tiny.
        tiny: sizes that a CPU runs in seconds, and stand-ins for packages that are not here.
        rounds: timed rounds of each contender.
        peers: names to which peers are limited; none: all.
        checked: how far a contender is off.

    Returns:
        {"rows": a row per contender, "experts": the same for the experts alone, "notes": who is missing and why}.

    Raises:
        WrongError: ours are wrong.
    """
    race = _Race(keep, shape, device)
    (sizes,) = chosen((shape,))
    if tiny:
        from tests.support.stand_ins import install

        install()
        sizes = sizes.tiny()
    elif LIGER not in race.out:
        race.begin(LIGER)
        tune_quickly()  # or choosing among hundreds of candidates would take the part's time
        race.begin(None)
    num_sets = 2 if tiny else sizes.weight_sets(total_memory(device))
    if not num_sets:
        needed = sizes.peak_bytes(1) / 2**30
        return {"rows": [], "experts": [], "notes": [f"Left out: needs {needed:.0f} GiB."]}
    generator = torch.Generator(device).manual_seed(0)
    weights = [WeightSet.draw(sizes, device, generator) for _ in range(num_sets)]
    inputs = Inputs.draw(sizes, device, generator)
    racers, missing = field_of(sizes, device=device, only=peers, without=tuple(race.out), trying=race.begin)
    race.missing = race.missing or [f"Not in the table: {why}." for why in missing]
    stopwatch = Stopwatch(device)
    if not race.rows:
        distances = {}
        for racer in racers:
            race.begin(racer.name)
            try:
                _first_run(racer, weights[0], inputs)
                distances[racer.name] = checked(sizes, racer, weights[0], inputs.batches[0], inputs.grad_TD, generator)
            except Exception as error:
                race.fail(error)
            racer.take(weights[0])  # lets go of gradients
            release(device)
        times = race.timed(racers, stopwatch, rounds, lambda r: entries(r, weights, inputs))
        race.rows = [row(sizes, name, s) | {"off by": distances[name]} for name, s in times.items()]
        race.begin(None)
        release(device)
    raced = {one["contender"] for one in race.rows} - race.out.keys()
    ready = [racer for racer in racers if racer.name in raced]
    race.experts = _experts_alone(race, sizes, ready, weights, inputs, stopwatch, rounds)
    return race.found()


def _experts_alone(
    race: _Race,
    sizes: RaceShape,
    racers: list[Racer],
    weights: list[WeightSet],
    inputs: Inputs,
    stopwatch: Stopwatch,
    rounds: int,
) -> list[dict[str, Any]]:
    """Rows of the experts with a choice that all are given: who routes in which type does not count."""
    ids_TK = racers[0].expert_ids(inputs.batches[0])
    weights_TK = torch.full_like(ids_TK, 1.0 / sizes.top_k, dtype=torch.float32)
    trying, expected = [], None
    for racer in racers:
        if racer.experts is None:
            continue
        race.begin(racer.name)
        try:
            racer.take(weights[0])
            with torch.no_grad():
                y_TD = racer.experts(inputs.batches[0], weights_TK, ids_TK)
            expected = y_TD if expected is None else expected
            _near(y_TD, expected)
            trying.append(racer)
        except Exception as error:
            race.fail(error)

    def run(racer: Racer) -> Callable[[torch.Tensor], torch.Tensor]:
        leaf_TK = weights_TK.clone().requires_grad_()
        return lambda x_TD: racer.experts(x_TD, leaf_TK, ids_TK)

    times = race.timed(trying, stopwatch, rounds, lambda r: entries(r, weights, inputs, run(r)))
    return [row(sizes, name, s) for name, s in times.items()]


def _near(y_TD: torch.Tensor, expected_TD: torch.Tensor) -> None:
    distance = float((y_TD.float() - expected_TD.float()).norm() / expected_TD.float().norm())
    assert distance < FAR_OFF, f"off by {distance:.3f}"


def _first_run(racer: Racer, weights: WeightSet, inputs: Inputs) -> None:
    """Compile and tune at the size that is timed: peers' autotuners keep what wins here."""
    racer.take(weights)
    racer(inputs.batches[0].detach().requires_grad_()).backward(inputs.grad_TD)


def entries(
    racer: Racer,
    weights: list[WeightSet],
    inputs: Inputs,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[Entry]:
    """Forward and backward each on its own, and the two together, on a new batch and set of weights per round."""
    now: dict[str, torch.Tensor] = {}
    call = run or racer

    def prepare(number: int) -> None:
        racer.take(weights[number % len(weights)])
        now["x"] = inputs.batches[number % len(inputs.batches)].detach().requires_grad_()

    def finish() -> None:
        racer.take(weights[0])
        now.clear()

    def forward() -> None:
        now["y"] = call(now["x"])

    return [
        Entry(
            racer.name,
            prepare,
            {"forward": forward, "backward": lambda: now["y"].backward(inputs.grad_TD)},
            finish,
        ),
        Entry(
            f"{racer.name}, both",
            prepare,
            {"both": lambda: call(now["x"]).backward(inputs.grad_TD)},
            finish,
        ),
    ]


def row(shape: RaceShape, name: str, by_phase: dict[str, Sample]) -> dict[str, Any]:
    """A contender's line: milliseconds and TFLOP/s per phase, spread, the host's time, rounds."""
    found: dict[str, Any] = {"contender": name}
    for phase in PHASES:
        found[f"{phase} ms"] = by_phase[phase].median_s * 1e3
        found[f"{phase} TFLOP/s"] = shape.flops(phase) / by_phase[phase].median_s / 1e12
    return found | {
        "spread": by_phase["both"].spread,
        "host ms": by_phase["both"].host_median_s * 1e3,
        "rounds": len(by_phase["both"].device_s),
    }


def total_memory(device: str) -> int:
    """Bytes of the GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def release(device: str, *, cuda: Any = torch.cuda, end: Callable[[int], object] = os._exit) -> None:
    """Give cached memory back, so that one contender's pieces do not crowd the next.

    Where a kernel has lost the GPU (a bad address, say), every later call of this process fails: then it ends here, as
    a crash does, and another attempt goes on without who was being tried.

    Args:
        device: cuda or cpu.
        cuda: waits for the device and empties the cache.
        end: of the process.
    """
    gc.collect()
    if not device.startswith("cuda"):
        return
    try:
        cuda.synchronize()
        cuda.empty_cache()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        end(_LOST_GPU)
