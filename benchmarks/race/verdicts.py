"""What the lines say of a record: hard lines, goals, skew, decoding. No torch."""

from typing import Any

from benchmarks.race.peers import listed
from benchmarks.race.shapes import PHASES, SHAPES, RaceShape

Record = dict[str, Any]
OURS = "expertmesh"
LIGER, CUTE, SONIC = "Liger-Kernel fused MoE", "Liger CuTe", "SonicMoE"
TRANSFORMERS, EINSUM = "transformers grouped_mm", "einsum"
HARD_LINES = ((LIGER, 1.3), (TRANSFORMERS, 1.5), (SONIC, 0.85), (CUTE, 0.85))
"""Forward + backward of ours at least this many times as fast. Liger's line is against its portable Triton kernels; its
CuTe kernels and SonicMoE are the anchors, to be equalled in the end."""
LEAST_OVER_EINSUM = 8.5
LEAST_METADATA_SPEEDUP = 24.0
MOST_SKEW_LOSS = 0.10
LEAST_OF_FLOOR = {1: 0.5, 8: 0.5, 32: 0.8, 128: 0.8}
"""Share of the weight-bandwidth floor that decoding T tokens is to reach."""
GOALS_CEILING = 790e12
"""FLOP/s of a large BF16 product on the H200 that the goals are for; on another GPU they are scaled by its own."""


def goal_of(record: Record, shape: RaceShape, phase: str) -> float | None:
    """TFLOP/s wanted on the GPU of the record."""
    goal, machine = shape.goals.of(phase), record.get("machine") or {}
    if goal is None or "H200" in machine.get("gpu", "H200") or "gemm_flops_per_s" not in machine:
        return goal
    return goal * min(1.0, machine["gemm_flops_per_s"] / GOALS_CEILING)


def speed_of(record: Record, shape: RaceShape, contender: str, phase: str, table: str = "rows") -> float | None:
    """TFLOP/s, or None if it did not race; `table` is rows or experts."""
    for row in (record["layers"].get(shape.name) or {}).get(table, ()):
        if row["contender"] == contender:
            return row[f"{phase} TFLOP/s"]
    return None


def verdict(value: float | None, least: float) -> str:
    """Whether a ratio reaches a line."""
    if value is None:
        return "not raced"
    return f"{value:.2f} x: {'holds' if value >= least else 'MISSED'} (at least {least} x)"


def _ratio(record: Record, shape: RaceShape, peer: str, table: str = "rows") -> float | None:
    mine = speed_of(record, shape, OURS, "both", table)
    theirs = speed_of(record, shape, peer, "both", table)
    return mine / theirs if mine and theirs else None


def hard_lines(record: Record) -> list[dict[str, str]]:
    """A row per shape and line."""
    rows = []
    for shape in SHAPES:
        lines = ((EINSUM, LEAST_OVER_EINSUM),) if shape.against_einsum else HARD_LINES
        for peer, least in lines:
            word = verdict(_ratio(record, shape, peer), least)
            alone = _ratio(record, shape, peer, "experts")
            rows.append(
                {
                    "shape": shape.name,
                    "against": peer,
                    "verdict": word,
                    "experts alone": "" if alone is None else f"{alone:.2f} x",
                }
            )
    ratio = record["metadata"][0]["faster by"] if record.get("metadata") else None
    word = verdict(ratio, LEAST_METADATA_SPEEDUP)
    rows.append(
        {
            "shape": "route_metadata",
            "against": "one-hot + cumsum",
            "verdict": word,
            "experts alone": "",
        }
    )
    return rows


def decode_rows(record: Record) -> list[dict[str, Any]]:
    """Decoding against reading the live experts' weights (and the router's) once at the copy ceiling."""
    speed = (record.get("machine") or {}).get("copy_bytes_per_s")
    rows = []
    for row in record.get("decode") or ():
        if speed is not None:
            floor_us = row["bytes read"] / speed * 1e6
            row = row | {"floor us": floor_us, "of the floor": floor_us / row["graph us"]}
        rows.append(row)
    return rows


def other_lines(record: Record) -> list[dict[str, str]]:
    """Skew and decoding: a row per line."""
    rows = []
    for row in record.get("skew") or ():
        word = "holds" if row["loss"] <= MOST_SKEW_LOSS else "MISSED"
        found = f"{100 * row['loss']:.1f} % lost: {word} (at most {100 * MOST_SKEW_LOSS:.0f} %)"
        rows.append({"line": f"Zipf routing, {row['shape']}", "verdict": found})
    for row in decode_rows(record):
        least = LEAST_OF_FLOOR.get(row["T"])
        if least is not None and "of the floor" in row:
            word = "holds" if row["of the floor"] >= least else "MISSED"
            share = f"{100 * row['of the floor']:.0f} % of the floor"
            line = f"decoding {row['shape']}, T={row['T']}"
            rows.append({"line": line, "verdict": f"{share}: {word} (at least {100 * least:.0f} %)"})
    return rows


def goals(record: Record) -> list[dict[str, Any]]:
    """A row per shape and phase that ran: goal, reached, share of the ceilings, the anchors, what they published."""
    machine = record.get("machine") or {}
    rows = []
    for shape in SHAPES:
        for phase in PHASES:
            speed, goal = speed_of(record, shape, OURS, phase), goal_of(record, shape, phase)
            if speed is None or goal is None:
                continue
            word = "reached" if speed >= goal else f"not: {100 * speed / goal:.0f} %"
            row: dict[str, Any] = {
                "shape": shape.name,
                "pass": phase,
                "TFLOP/s": speed,
                "goal": goal,
                "": word,
            }
            for anchor in (SONIC, CUTE):
                theirs = speed_of(record, shape, anchor, phase)
                row[f"of {anchor}"] = f"{speed / theirs:.2f} x" if theirs else "not raced"
            row["published (not measured here)"] = published(shape, phase)
            if "gemm_flops_per_s" in machine:
                gemm, copy = machine["gemm_flops_per_s"], machine["copy_bytes_per_s"]
                floor_s = shape.floor_s(phase, flops_per_s=gemm, bytes_per_s=copy)
                row["of the GEMM ceiling"] = f"{100 * speed * 1e12 / gemm:.0f} %"
                row["roofline ms"] = floor_s * 1e3
                row["of the roofline"] = f"{100 * floor_s * speed * 1e12 / shape.flops(phase):.0f} %"
            rows.append(row)
    return rows


def published(shape: RaceShape, phase: str) -> str:
    """What authors published for a shape and pass, in words."""
    _, figures = listed()
    here = [f for f in figures if f.shape == shape.name and getattr(f, phase) is not None]
    return ", ".join(f"{f.peer} {getattr(f, phase):.0f} ({f.gpu})" for f in here)
