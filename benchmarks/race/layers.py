"""One shape of the race: contenders checked at full size, then timed side by side, whole layers and experts alone."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.race.check import FAR_OFF, check
from benchmarks.race.clock import Entry, Sample, Stopwatch, interleaved
from benchmarks.race.contenders import OURS, Inputs, Racer, WeightSet, field_of
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import PHASES, RaceShape, chosen
from benchmarks.race.warm import tune_quickly

_WARMUP = 2


class WrongError(Exception):
    """Our own results are wrong; no time counts."""


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
        keep: of the part. After a crash, whoever was being tried then is left out.
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
    (sizes,) = chosen((shape,))
    if tiny:
        from tests.support.stand_ins import install

        install()
        sizes = sizes.tiny()
    else:
        tune_quickly()  # or choosing among hundreds of candidates would take the part's time
    num_sets = 2 if tiny else sizes.weight_sets(total_memory(device))
    if not num_sets:
        needed = sizes.peak_bytes(1) / 2**30
        return {"rows": [], "experts": [], "notes": [f"Left out: needs {needed:.0f} GiB."]}
    generator = torch.Generator(device).manual_seed(0)
    weights = [WeightSet.draw(sizes, device, generator) for _ in range(num_sets)]
    inputs = Inputs.draw(sizes, device, generator)
    racers, missing = field_of(sizes, device=device, only=peers)
    notes = [f"Not in the table: {why}." for why in missing]
    died = (keep.before or {}).get("trying")
    if died == OURS:
        raise WrongError(f"{shape}: ours crashed or hung; no time counts")
    if died is not None:
        racers = [racer for racer in racers if racer.name != died]
        notes.append(f"Out of the race: {died}: crashed or hung.")
    ready, distances = [], {}
    for racer in racers:
        keep({"rows": [], "experts": [], "notes": notes, "trying": racer.name})
        try:
            _first_run(racer, weights[0], inputs)
            distances[racer.name] = checked(
                sizes, racer, weights[0], inputs.batches[0], inputs.grad_TD, generator
            )
            ready.append(racer)
        except Exception as error:
            if racer.name == OURS:
                raise WrongError(f"{shape}: {error}; no time counts") from error
            notes.append(
                f"Out of the race: {racer.name}: {type(error).__name__}: {str(error)[:300]}."
            )
        racer.take(weights[0])  # lets go of gradients
        release(device)
    stopwatch, found = Stopwatch(device), {"notes": notes, "experts": []}
    phases = [entry for racer in ready for entry in entries(racer, weights, inputs)]
    samples = interleaved(phases, stopwatch, rounds=rounds, warmup=_WARMUP)
    by_name = {r.name: {**samples[r.name], **samples[f"{r.name}, both"]} for r in ready}
    found["rows"] = [
        row(sizes, name, s) | {"off by": distances[name]} for name, s in by_name.items()
    ]
    keep(found)
    release(device)
    found["experts"] = _experts_alone(sizes, ready, weights, inputs, stopwatch, rounds, notes)
    return found


def _experts_alone(
    sizes: RaceShape,
    racers: list[Racer],
    weights: list[WeightSet],
    inputs: Inputs,
    stopwatch: Stopwatch,
    rounds: int,
    notes: list[str],
) -> list[dict[str, Any]]:
    """Rows of the experts with a choice that all are given: who routes in which type does not count."""
    ids_TK = racers[0].expert_ids(inputs.batches[0])
    weights_TK = torch.full_like(ids_TK, 1.0 / sizes.top_k, dtype=torch.float32)
    trying, expected = [], None
    for racer in racers:
        if racer.experts is None:
            continue
        racer.take(weights[0])
        try:
            with torch.no_grad():
                y_TD = racer.experts(inputs.batches[0], weights_TK, ids_TK)
            expected = y_TD if expected is None else expected
            _near(y_TD, expected)
            trying.append(racer)
        except Exception as error:
            notes.append(
                f"Experts alone: {racer.name}: {type(error).__name__}: {str(error)[:300]}."
            )

    def run(racer: Racer) -> Callable[[torch.Tensor], torch.Tensor]:
        leaf_TK = weights_TK.clone().requires_grad_()
        return lambda x_TD: racer.experts(x_TD, leaf_TK, ids_TK)

    phases = [e for r in trying for e in entries(r, weights, inputs, run(r))]
    samples = interleaved(phases, stopwatch, rounds=rounds, warmup=_WARMUP)
    return [row(sizes, r.name, {**samples[r.name], **samples[f"{r.name}, both"]}) for r in trying]


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


def release(device: str) -> None:
    """Give cached memory back, so that one contender's pieces do not crowd the next."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
