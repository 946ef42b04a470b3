"""The race on one GPU: our layer against the best there are, checked, timed side by side, judged.

    python -m benchmarks.race                                   # everything that fits nine minutes
    python -m benchmarks.race --quick                           # ceilings, maps, the first two shapes: about four minutes
    python -m benchmarks.race --parts layers --shapes mixtral-8k olmoe-32k
    python -m benchmarks.race --device cpu --tiny               # a dry run of all of it without a GPU

What an earlier call measured on the same hardware with the same versions stays in the result files; so several calls of
at most ten minutes make one report. Nothing is begun that would not fit `--budget-s`.
"""

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from benchmarks.harness import ResultsAreWrongError, circumstances
from benchmarks.layer_peers import versions
from benchmarks.race_check import check
from benchmarks.race_clock import Budget, Entry, Stopwatch, interleaved
from benchmarks.race_contenders import OURS, Inputs, Racer, WeightSet, field_of
from benchmarks.race_properties import properties
from benchmarks.race_shapes import SHAPES, RaceShape, chosen, decode_shapes

from benchmarks import race_parts, race_report, race_warm

PARTS = ("ceilings", "metadata", "layers", "properties", "skew", "decode")
Part = Literal["ceilings", "metadata", "layers", "properties", "skew", "decode"]
QUICK_SHAPES = ("qwen3-8k", "qwen3-32k")
_FIRST_SHAPE_S = 60.0
"""Guess for a shape before one was seen: autotuning of peers, the oracle, the rounds."""
_PART_S = {"ceilings": 10.0, "metadata": 15.0, "properties": 90.0, "skew": 20.0, "decode": 40.0}


class Race:
    """One call: the device, the budget, the record, and where it is written after every part."""

    def __init__(
        self,
        *,
        device: str,
        tiny: bool,
        rounds: int,
        budget: Budget,
        record: race_report.Record,
        save: Callable[[], None],
        peers: tuple[str, ...] = (),
    ) -> None:
        self.peers, self.failures = peers, list[str]()
        self.device, self.tiny, self.rounds = device, tiny, rounds
        self.budget, self.record, self.save = budget, record, save
        self.stopwatch = Stopwatch(device)
        self.longest_shape_s = 0.0 if tiny else _FIRST_SHAPE_S

    def size(self, shape: RaceShape) -> RaceShape:
        return shape.tiny() if self.tiny else shape

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def part(self, name: str, run: Callable[[], Any]) -> None:
        """Run one of the smaller parts if it fits, keep what it gives."""
        needed = 0.0 if self.tiny else _PART_S[name]
        if not self.budget.allows(needed):
            print(f"{name}: left out, {self.budget.left_s:.0f} s are left", flush=True)
            return
        began = time.monotonic()
        try:
            self.record[name] = run()
        except Exception as error:
            self._failed(name, error)
        self._finished(name, began)

    def layers(self, shapes: list[RaceShape]) -> None:
        """Race all shapes that fit the budget and the memory."""
        for shape in shapes:
            if not self.budget.allows(self.longest_shape_s):
                print(f"{shape.name}: left out, {self.budget.left_s:.0f} s are left", flush=True)
                continue
            sets = 2 if self.tiny else shape.weight_sets(total_memory(self.device))
            if not sets:
                print(f"{shape.name}: left out, needs {shape.peak_bytes(1) / 2**30:.0f} GiB")
                continue
            began = time.monotonic()
            try:
                self.record["layers"][shape.name] = self.one_shape(self.size(shape), sets)
            except Exception as error:
                self.record["layers"][shape.name] = {"rows": [], "notes": [f"FAILED: {error}"]}
                self._failed(shape.name, error)
            self._finished(shape.name, began)
            self.longest_shape_s = max(
                0.0 if len(self.record["layers"]) == 1 else self.longest_shape_s,
                time.monotonic() - began,
            )

    def _failed(self, name: str, error: Exception) -> None:
        """The other parts still run; `main` ends with an error."""
        traceback.print_exception(error)
        self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def _finished(self, name: str, began: float) -> None:
        release(self.device)
        self.save()
        print(
            f"{name}: {time.monotonic() - began:.1f} s; {self.budget.left_s:.0f} s left", flush=True
        )

    def one_shape(self, shape: RaceShape, num_sets: int) -> dict[str, Any]:
        """Check and time all contenders of a shape.

        Raises:
            ResultsAreWrongError: ours are wrong.
        """
        generator = self.generator()
        weights = [WeightSet.draw(shape, self.device, generator) for _ in range(num_sets)]
        inputs = Inputs.draw(shape, self.device, generator)
        racers, missing = field_of(shape, device=self.device, only=self.peers)
        ready, distances, notes = [], {}, [f"Not in the table: {why}." for why in missing]
        for racer in racers:
            try:
                self._first_run(racer, weights[0], inputs)
                distances[racer.name] = check(
                    shape, racer, weights[0], inputs.batches[0], inputs.grad_TD, generator
                )
                ready.append(racer)
            except Exception as error:
                if racer.name == OURS:
                    raise ResultsAreWrongError(f"{shape.name}: {error}; no time counts") from error
                notes.append(f"Out of the race: {racer.name}: {type(error).__name__}: {error}.")
            racer.take(weights[0])  # lets go of gradients
            release(self.device)
        samples = self._timed(ready, weights, inputs)
        return {"rows": race_report.layer_rows(shape, samples, distances), "notes": notes}

    def _first_run(self, racer: Racer, weights: WeightSet, inputs: Inputs) -> None:
        """Compile and tune at the size that is timed: peers' autotuners keep what wins here."""
        racer.take(weights)
        racer(inputs.batches[0].detach().requires_grad_()).backward(inputs.grad_TD)

    def _timed(
        self, racers: list[Racer], weights: list[WeightSet], inputs: Inputs
    ) -> dict[str, dict[str, Any]]:
        phases = [entry for racer in racers for entry in entries(racer, weights, inputs)]
        found = interleaved(phases, self.stopwatch, rounds=self.rounds, warmup=2)
        return {r.name: {**found[r.name], **found[f"{r.name}, both"]} for r in racers}


def entries(racer: Racer, weights: list[WeightSet], inputs: Inputs) -> list[Entry]:
    """Forward and backward each on its own, and the two together, on a new batch and set of weights per round."""
    now: dict[str, torch.Tensor] = {}

    def prepare(number: int) -> None:
        racer.take(weights[number % len(weights)])
        now["x"] = inputs.batches[number % len(inputs.batches)].detach().requires_grad_()

    def finish() -> None:
        racer.take(weights[0])
        now.clear()

    def forward() -> None:
        now["y"] = racer(now["x"])

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
            {"both": lambda: racer(now["x"]).backward(inputs.grad_TD)},
            finish,
        ),
    ]


def total_memory(device: str) -> int:
    """Bytes of the GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def release(device: str) -> None:
    """Give cached memory back, so that one contender's pieces do not crowd the next."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def surroundings(device: str) -> dict[str, Any]:
    """Circumstances, with the GPU told apart by its memory."""
    is_cuda = device.startswith("cuda")
    around = circumstances(clock="cuda" if is_cuda else "wall", peers=versions())
    around["gpu"] = "no GPU"
    if is_cuda:
        seen = torch.cuda.get_device_properties(device)
        around["gpu"] = (
            f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, {seen.multi_processor_count} multiprocessors"
        )
        around["versions"]["cuda"] = str(torch.version.cuda)
    return around


def print_plan(shapes: list[RaceShape], parts: tuple[Part, ...], device: str) -> None:
    """Memory of every shape and seconds of every part, before anything runs."""
    total = total_memory(device) if device.startswith("cuda") else 0
    print("shape            weights GiB  peak GiB (1 set, 2 sets)  fits 80 GB  141 GB  here")
    for shape in shapes:
        one, two = (shape.peak_bytes(n) / 2**30 for n in (1, 2))
        fits = [f"{shape.weight_sets(size) or 'no'}" for size in (int(79e9), int(141e9), total)]
        print(
            f"{shape.name:16s} {shape.weight_bytes / 2**30:11.1f}  {one:10.0f} {two:10.0f}"
            f"  {fits[0]:>12s} {fits[1]:>7s} {fits[2]:>5s}   sets of weights"
        )
    seconds = {part: _PART_S.get(part, _FIRST_SHAPE_S * len(shapes)) for part in parts}
    warm = race_warm.expected_s(shapes, with_liger=race_warm.absent("liger_kernel") is None)
    listed = ", ".join(f"{part} {s:.0f}" for part, s in seconds.items())
    print(f"seconds expected: compiling {warm:.0f}, {listed}", flush=True)


def main(
    device: str = "cuda",
    parts: tuple[Part, ...] = PARTS,
    shapes: tuple[str, ...] = (),
    peers: tuple[str, ...] = (),
    quick: bool = False,
    tiny: bool = False,
    rounds: int = 15,
    budget_s: float = 540.0,
    warm: bool = True,
    name: str | None = None,
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, judge, write.

    Args:
        device: cuda, or cpu with tiny.
        parts: what to run.
        shapes: names of shapes; none: all.
        peers: names of peers as in the tables; none: all that are installed.
        quick: ceilings, maps and two shapes only.
        tiny: shapes that a CPU runs in seconds; the numbers then mean nothing.
        rounds: timed rounds of each contender.
        budget_s: begin nothing that would end later than this.
        warm: compile in parallel before the race (GPUs only).
        name: of the result files; none: layer_ and the GPU's name and the month.
        out: folder of the result files.

    Raises:
        ResultsAreWrongError: at the end, if a part failed; the others are reported.
    """
    budget = Budget(budget_s)
    if quick:
        parts, shapes = ("ceilings", "metadata", "layers"), shapes or QUICK_SHAPES
    found = chosen(shapes)
    is_cuda = device.startswith("cuda")
    around = surroundings(device)
    path = out / (name or default_name(around))
    record = race_report.load(path, around)
    command = f"python -m benchmarks.race --parts {' '.join(parts)}"
    race = Race(
        device=device,
        tiny=tiny,
        rounds=rounds,
        budget=budget,
        record=record,
        save=lambda: race_report.write(path, record, command=command),
        peers=peers,
    )
    print_plan(found, parts, device)
    if is_cuda and warm and {"layers", "decode", "skew", "properties"} & set(parts):
        used = race_warm.warm(found, limit_s=budget_s / 3)
        print(f"compiled in {used:.0f} s", flush=True)
    if is_cuda:
        race_warm.tune_quickly()
    run_parts(race, parts, found)
    print(race_report.short(record))
    if race.failures:
        raise ResultsAreWrongError("; ".join(race.failures))


def run_parts(race: Race, parts: tuple[Part, ...], shapes: list[RaceShape]) -> None:
    """Run the parts in their order."""
    device, rounds, stopwatch = race.device, race.rounds, race.stopwatch
    first = race.size(SHAPES[0])
    if "ceilings" in parts:
        race.part(
            "ceilings",
            lambda: race_parts.ceilings(stopwatch, device, tiny=race.tiny, rounds=rounds),
        )
    if "metadata" in parts:
        race.part(
            "metadata",
            lambda: race_parts.metadata(stopwatch, device, tiny=race.tiny, rounds=rounds),
        )
    if "layers" in parts:
        race.layers(shapes)
    if "skew" in parts:
        race.part("skew", lambda: [race_parts.skew(first, stopwatch, device, rounds=rounds)])
    if "decode" in parts:
        bytes_per_s = race.record.get("ceilings", {}).get("copy_bytes_per_s")
        if bytes_per_s is None:
            raise SystemExit("decode compares with the copy ceiling; run --parts ceilings decode")
        race.part(
            "decode",
            lambda: [
                race_parts.decode(
                    decode_size(shape, tiny=race.tiny),
                    stopwatch,
                    device,
                    bytes_per_s=bytes_per_s,
                    rounds=4 * rounds,
                )
                for shape in decode_shapes()
            ],
        )
    if "properties" in parts:
        race.part("properties", lambda: properties(first, device))


def decode_size(shape: RaceShape, *, tiny: bool) -> RaceShape:
    """A decoding shape, its widths reduced for a dry run."""
    return replace(shape, dim=64, hidden_dim=96) if tiny else shape


def default_name(around: dict[str, Any]) -> str:
    """layer_h200_202611, ..."""
    words = around["gpu"].split(",")[0].lower().split()
    gpu = next((w for w in words if any(c.isdigit() for c in w)), "cpu_dry_run")
    return f"layer_{gpu}_{time.strftime('%Y%m')}"


if __name__ == "__main__":
    tyro.cli(main)
