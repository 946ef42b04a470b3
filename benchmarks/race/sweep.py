"""The sweep of tiles: each GEMM of a step alone, every candidate beside today's table, best and worst kept.

`tables` turns what came back into the file that the host table reads (`expertmesh.kernels.measured`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benchmarks.clock import Entry, Stopwatch, interleaved
from benchmarks.race.contenders import Inputs, WeightSet, ours
from benchmarks.race.kernels import Experts, Launched, launches_of, resources
from benchmarks.race.layers import release
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import RaceShape, chosen
from benchmarks.race.warm import compile_launches, from_outside, jobs, our_launches, shared_out

from expertmesh.kernels import tile_tables as tables_of
from expertmesh.kernels import tiles
from expertmesh.kernels.tile_tables import GEMMS, OVER_ROWS
from expertmesh.kernels.tiles import LaunchConfig, Tile

_FAR_OFF = 0.02
"""Relative distance from the results of today's tiles beyond which a candidate computes something else."""


def candidates(gemm: str, base: Tile, plans: dict[str, LaunchConfig]) -> dict[str, Tile]:
    """The tiles to try for a GEMM by the name of their table, today's first; those that change nothing are left out.

    Args:
        gemm: one of GEMMS.
        base: today's tile.
        plans: of `every_table`.
    """
    found = {"today": base}
    for name, plan in plans.items():
        tile = getattr(plan, gemm)
        if tile not in found.values():
            found[name] = tile
    return found


def every_table(shape: RaceShape, arch: str) -> dict[str, LaunchConfig]:
    """The plans of an architecture's tables for a shape, by name."""
    return {name: planned(shape, arch, name) for name in tables_of.names(arch)}


def with_tile(plan: LaunchConfig, gemm: str, tile: Tile) -> LaunchConfig:
    """The plan with another tile for a GEMM; those that share its table of rows get its block_m."""
    if gemm in OVER_ROWS:
        shared = {name: replace(getattr(plan, name), block_m=tile.block_m) for name in OVER_ROWS}
        plan = replace(plan, **shared)
    return replace(plan, **{gemm: tile})


@contextmanager
def using(gemm: str, tile: Tile) -> Iterator[None]:
    """Inside, plans have this tile."""
    choose = tiles.config_for

    def config_for(*args: Any, **options: Any) -> LaunchConfig:
        return with_tile(choose(*args, **options), gemm, tile)

    with mock.patch.object(tiles, "config_for", config_for):
        yield


def planned(shape: RaceShape, arch: str, table: str = tables_of.DEFAULT) -> LaunchConfig:
    """A table's plan for a shape."""
    return tiles.config_for(
        arch,
        torch.bfloat16,
        rows_per_expert=shape.num_rows / shape.num_experts,
        dim=shape.dim,
        hidden_dim=shape.hidden_dim,
        num_branches=shape.num_branches,
        table=table,
    )


def builds(keep: Keep, *, shapes: Sequence[str], device: str, tiny: bool = False) -> dict[str, Any]:
    """A part: compile all candidates of all GEMMs for these shapes, in as many processes as there are cores."""
    arch, count = from_outside(), jobs()
    launches: dict[str, Any] = {}
    for shape in chosen(tuple(shapes))[: 1 if tiny else None]:
        plan, plans = planned(shape, arch), every_table(shape, arch)
        for gemm in GEMMS[: 1 if tiny else None]:
            for tile in candidates(gemm, getattr(plan, gemm), plans).values():
                with using(gemm, tile):
                    for launch in our_launches(shape, arch, training=True):
                        launches.setdefault(launch.key, launch)
    every = list(launches.values())
    keep({"builds": len(every)})

    def share(part: int, of: int) -> None:
        compile_launches(every, device, part, of, tiny=tiny)

    return {"builds": len(every), "processes": count, "failed": shared_out(share, count)}


def sweep(
    keep: Keep,
    *,
    gemm: str,
    shape: str,
    device: str,
    tiny: bool = False,
    rounds: int = 11,
) -> dict[str, Any]:
    """A part: time every candidate of one GEMM at one shape, beside today's tile in the same rounds.

    Args:
        keep: of the part; after a crash or a hang the candidate of that moment is skipped.
        gemm: one of GEMMS.
        shape: its name.
        device: cuda, or cpu with tiny (the interpreter).
        tiny: sizes that the interpreter runs in seconds, and two candidates.
        rounds: timed rounds.

    Returns:
        {"shape": sizes, "gemm", "rows": a row per candidate, with its tile and microseconds, or why it has none}.
    """
    (sizes,) = chosen((shape,))
    sizes = sizes.smallest() if tiny else sizes
    found = keep.before or {"shape": asdict(sizes), "gemm": gemm, "rows": []}
    if found.get("trying"):
        found["rows"].append({"candidate": found.pop("trying"), "error": "crashed or hung"})
    done = {row["candidate"] for row in found["rows"]}
    generator = torch.Generator(device).manual_seed(0)
    weights = WeightSet.draw(sizes, device, generator)
    inputs = Inputs.draw(sizes, device, generator, 1)
    racer = ours(sizes, device=device)
    racer.take(weights)
    ids_TK = racer.expert_ids(inputs.batches[0])
    experts = Experts(sizes, weights, inputs.batches[0], inputs.grad_TD, ids_TK)
    stopwatch = Stopwatch(device)
    arch = tiles.architecture(torch.device(device))
    base = getattr(planned(sizes, arch), gemm)
    first, results = _launch(experts, gemm), _results(experts)
    tried = candidates(gemm, base, every_table(sizes, arch))
    found["arch"] = arch
    for name in list(tried)[: 2 if tiny else None]:
        if name in done:
            continue
        keep(found | {"trying": name})
        row: dict[str, Any] = {"candidate": name, "tile": asdict(tried[name])}
        try:
            with using(gemm, tried[name]):
                one = _launch(experts, gemm)
                row |= resources(one.run())
            far = max(_distance(a, b) for a, b in zip(_results(experts), results, strict=True))
            assert far < _FAR_OFF, f"off by {far:.3f}"
            row |= _beside(first, one, stopwatch, 1 if tiny else rounds)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        found["rows"].append(row)
        keep(found)
        release(device)
    return found


def _launch(experts: Experts, gemm: str) -> Launched:
    return next(one for one in launches_of(experts) if one.role == gemm)


def _results(experts: Experts) -> list[torch.Tensor]:
    return [experts.y_TD.detach(), *experts.grads]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))


def _beside(first: Launched, one: Launched, stopwatch: Stopwatch, rounds: int) -> dict[str, float]:
    entries = [Entry("today", id, {"run": first.run}), Entry("this", id, {"run": one.run})]
    found = interleaved(entries, stopwatch, rounds=rounds, warmup=1)
    times = {name: by_part["run"].median_s * 1e6 for name, by_part in found.items()}
    return {
        "us": times["this"],
        "today us": times["today"],
        "of today": times["this"] / times["today"],
    }


def tables(results: Sequence[dict[str, Any]], source: str) -> dict[str, list[dict[str, Any]]]:
    """What sweeps found, as the file that the host table reads: per shape the tiles that take least together.

    Args:
        results: of `sweep`.
        source: GPU and month.

    Returns:
        {arch: [entry]}; beside the tiles each entry keeps their microseconds, today's, and the worst candidate of each
        GEMM.
    """
    by_shape: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_shape.setdefault(result["shape"]["name"], []).append(result)
    found: dict[str, list[dict[str, Any]]] = {}
    for group in by_shape.values():
        timed = {r["gemm"]: [row for row in r["rows"] if "us" in row] for r in group}
        if set(timed) != set(GEMMS) or not all(timed.values()):
            continue  # a plan needs all six
        best = _together(timed)
        shape = {k: v for k, v in group[0]["shape"].items() if k != "goals"}
        gated = shape["activation"] == "swiglu"
        entry = {
            "shape": shape["name"],
            "rows_per_expert": shape["num_tokens"] * shape["top_k"] / shape["num_experts"],
            "dim": shape["dim"],
            "hidden_dim": shape["hidden_dim"],
            "num_branches": 2 if gated else 1,
            "dtype": "bfloat16",
            "source": source,
            "tiles": {gemm: row["tile"] | {"source": source} for gemm, row in best.items()},
            "us": {gemm: row["us"] for gemm, row in best.items()},
            "today us": {gemm: row["today us"] for gemm, row in best.items()},
            "worst": {
                gemm: {k: row[k] for k in ("candidate", "of today")}
                for gemm, rows in timed.items()
                for row in [max(rows, key=_of_today)]
            },
        }
        found.setdefault(group[0]["arch"], []).append(entry)
    return found


def _of_today(row: dict[str, Any]) -> float:
    return row["of today"]


def _together(timed: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The best row of each GEMM, those over rows under one block_m: the one with the smallest sum."""

    def best(gemm: str, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        return min(filter(fits, timed[gemm]), key=_of_today, default=None)

    plans = []
    for block_m in sorted({row["tile"]["block_m"] for row in timed["up"]}):
        rows = {g: best(g, lambda r, m=block_m: r["tile"]["block_m"] == m) for g in OVER_ROWS}
        if all(rows.values()):
            plans.append(rows)
    least = min(plans, key=lambda rows: sum(row["us"] for row in rows.values()))
    return least | {g: best(g, lambda row: True) for g in GEMMS if g not in OVER_ROWS}


def write_tables(file: Path, record: dict[str, Any]) -> None:
    """Write the file that the host table reads from a call's record, when there is something to write."""
    done = [
        outcome["result"]
        for name, outcome in record["parts"].items()
        if name.startswith("sweep") and outcome["result"] and "arch" in outcome["result"]
    ]
    machine = record["parts"].get("machine", {}).get("result") or {}
    source = f"measured on {machine.get('gpu', 'an unknown GPU')}, {machine.get('date', 'no date')}"
    found = tables(done, source)
    if found:
        file.write_text(json.dumps(found, indent=1) + "\n")
