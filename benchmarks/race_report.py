"""The race's record as verdicts, Markdown, JSON and a plot. A record from the same circumstances is added to."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import markdown_table
from benchmarks.race_contenders import EINSUM, OURS, TRANSFORMERS
from benchmarks.race_parts import LEAST_METADATA_SPEEDUP, LEAST_OF_FLOOR, MOST_SKEW_LOSS
from benchmarks.race_shapes import PHASES, SHAPES, RaceShape

Record = dict[str, Any]
HARD_LINES = (("Liger-Kernel fused MoE", 1.3), (TRANSFORMERS, 1.5), ("SonicMoE", 1.0))
"""Forward + backward of ours at least this many times as fast."""
LEAST_OVER_EINSUM = 8.5
METHOD = (
    "BF16, router included, balanced random routing. Medians of interleaved rounds; before every timed part the L2 is "
    "flushed and the device waits 2 ms, so that launches do not count where a contender does not wait for the device; "
    "weights are rotated where two sets fit. Operations: 6 T K D F forward for gated experts, 4 T K D F for plain "
    "ones, twice that backward. Every contender was checked at full size against an FP64 oracle on sampled tokens and "
    "experts (`off by`: largest relative distance) before its time counts."
)
COLORS = ("#0b6e99", "#c4632c", "#6b8e23", "#8a5aa5", "#b8860b", "#777777", "#a83254")


def load(path: Path, around: dict[str, Any]) -> Record:
    """The record at path.json if it comes from the same circumstances, else a fresh one."""
    file = path.with_suffix(".json")
    if file.exists():
        record = json.loads(file.read_text())
        if record["circumstances"] == around:
            return record
    return {"circumstances": around, "layers": {}}


def layer_rows(
    shape: RaceShape, samples: dict[str, dict[str, Any]], distances: dict[str, float]
) -> list[dict[str, Any]]:
    """One row per contender of a shape: milliseconds and TFLOP/s per phase."""
    rows = []
    for name, by_phase in samples.items():
        row: dict[str, Any] = {"contender": name}
        for phase in PHASES:
            row[f"{phase} ms"] = by_phase[phase].median_s * 1e3
            row[f"{phase} TFLOP/s"] = shape.flops(phase) / by_phase[phase].median_s / 1e12
        row["spread"] = by_phase["both"].spread
        row["host ms"] = by_phase["both"].host_median_s * 1e3
        row["off by"] = distances[name]
        row["rounds"] = len(by_phase["both"].device_s)
        rows.append(row)
    return rows


def speed_of(record: Record, shape: RaceShape, contender: str, phase: str) -> float | None:
    """TFLOP/s, or None if it did not race."""
    for row in record["layers"].get(shape.name, {}).get("rows", ()):
        if row["contender"] == contender:
            return row[f"{phase} TFLOP/s"]
    return None


def verdict(value: float | None, least: float) -> str:
    if value is None:
        return "not raced"
    return f"{value:.2f} x: {'holds' if value >= least else 'MISSED'} (at least {least} x)"


def hard_lines(record: Record) -> list[dict[str, str]]:
    """A row per shape and line."""
    rows = []
    for shape in SHAPES:
        mine = speed_of(record, shape, OURS, "both")
        lines = [(EINSUM, LEAST_OVER_EINSUM)] if shape.against_einsum else HARD_LINES
        for peer, least in lines:
            theirs = speed_of(record, shape, peer, "both")
            ratio = mine / theirs if mine and theirs else None
            rows.append({"shape": shape.name, "against": peer, "verdict": verdict(ratio, least)})
    ratio = record["metadata"][0]["faster by"] if record.get("metadata") else None
    rows.append(
        {
            "shape": "route_metadata",
            "against": "one-hot + cumsum",
            "verdict": verdict(ratio, LEAST_METADATA_SPEEDUP),
        }
    )
    return rows


def other_lines(record: Record) -> list[dict[str, str]]:
    """Skew and decoding: a row per line."""
    rows = []
    for row in record.get("skew", ()):
        word = "holds" if row["loss"] <= MOST_SKEW_LOSS else "MISSED"
        found = f"{100 * row['loss']:.1f} % lost: {word} (at most {100 * MOST_SKEW_LOSS:.0f} %)"
        rows.append({"line": f"Zipf routing, {row['shape']}", "verdict": found})
    for row in record.get("decode", ()):
        least = LEAST_OF_FLOOR.get(row["T"])
        if least is not None:
            word = "holds" if row["of the floor"] >= least else "MISSED"
            share = f"{100 * row['of the floor']:.0f} % of the floor"
            rows.append(
                {
                    "line": f"decoding {row['shape']}, T={row['T']}",
                    "verdict": f"{share}: {word} (at least {100 * least:.0f} %)",
                }
            )
    return rows


def stretch(record: Record) -> list[dict[str, Any]]:
    """A row per shape and phase that ran: goal, reached, share of the ceilings."""
    ceilings = record.get("ceilings")
    rows = []
    for shape in SHAPES:
        for phase in PHASES:
            speed = speed_of(record, shape, OURS, phase)
            goal = shape.goals.of(phase)
            if speed is None or goal is None:
                continue
            row: dict[str, Any] = {
                "shape": shape.name,
                "pass": phase,
                "TFLOP/s": speed,
                "goal": goal,
                "": "reached" if speed >= goal else f"not: {100 * speed / goal:.0f} %",
            }
            if ceilings:
                gemm, copy = ceilings["gemm_flops_per_s"], ceilings["copy_bytes_per_s"]
                seconds = shape.flops(phase) / speed / 1e12
                floor = shape.floor_s(phase, flops_per_s=gemm, bytes_per_s=copy)
                row["of the GEMM ceiling"] = f"{100 * speed * 1e12 / gemm:.0f} %"
                row["GB moved at least"] = shape.least_bytes(phase) / 1e9
                row["roofline ms"] = floor * 1e3
                row["of the roofline"] = f"{100 * floor / seconds:.0f} %"
            rows.append(row)
    return rows


def _section(title: str, rows: Sequence[dict[str, Any]], *notes: str) -> list[str]:
    return [f"## {title}", *notes, markdown_table(rows)] if rows else []


def describe(shape: RaceShape) -> str:
    """Sizes in words."""
    return (
        f"{shape.title}: T={shape.num_tokens}, D={shape.dim}, F={shape.hidden_dim}, "
        f"E={shape.num_experts}, K={shape.top_k}, {shape.activation}"
    )


def markdown(record: Record, *, command: str, plot: str) -> str:
    """The whole report."""
    around = record["circumstances"]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    text = [
        "# The layer against others on one GPU",
        f"`{command}`",
        f"{around['gpu']}; {around['cpu']}; {around['clock']}; {versions}; {around['date']}.",
        METHOD,
    ]
    ceilings = record.get("ceilings")
    if ceilings:
        text.append(
            f"Ceilings measured in the same run: copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s (read and written), "
            f"BF16 product of {ceilings['gemm_size']}^3 {ceilings['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s."
        )
    text += _section("Hard lines", hard_lines(record))
    text += _section("Skew and decoding", other_lines(record))
    text += _section("Goals", stretch(record))
    if record["layers"]:
        text += ["## All contenders", f"![TFLOP/s]({plot})"]
    for shape in SHAPES:
        found = record["layers"].get(shape.name)
        if found:
            text += [f"### {describe(shape)}", *found["notes"]]
            text += [markdown_table(found["rows"])] if found["rows"] else []
    text += _section("What must hold beside speed", record.get("properties", ()))
    text += _section("Maps", record.get("metadata", ()))
    text += _section("Skewed routing", record.get("skew", ()))
    text += _section(
        "Decoding",
        record.get("decode", ()),
        "One CUDA graph of a step without gradients; the floor reads the live experts' weights (and the router's) once at "
        "the copy ceiling.",
    )
    return "\n\n".join(text) + "\n"


def svg(record: Record, phase: str = "both", width: int = 900) -> str:
    """Bars of TFLOP/s per shape and contender, with the goals as ticks."""
    shapes = [s for s in SHAPES if record["layers"].get(s.name, {}).get("rows")]
    names = list(
        dict.fromkeys(r["contender"] for s in shapes for r in record["layers"][s.name]["rows"])
    )
    speeds = {s.name: {n: speed_of(record, s, n, phase) for n in names} for s in shapes}
    goals = {s.name: s.goals.of(phase) or 0.0 for s in shapes}
    most = max([v or 0.0 for by in speeds.values() for v in by.values()] + list(goals.values()))
    left, bar, gap, top = 150, 14, 16, 30 + 18 * ((len(names) + 2) // 3)
    parts, y = [], float(top)

    def x_of(value: float) -> float:
        return left + (width - left - 70) * value / most

    for i, name in enumerate(names):
        x, line = 10 + 290 * (i % 3), 20 + 18 * (i // 3)
        parts.append(
            f'<rect x="{x}" y="{line - 10}" width="12" height="12" fill="{COLORS[i % len(COLORS)]}"/>'
            f'<text x="{x + 18}" y="{line}">{name}</text>'
        )
    for shape in shapes:
        start = y
        for i, name in enumerate(names):
            value = speeds[shape.name][name]
            if value is not None:
                parts.append(
                    f'<rect x="{left}" y="{y:.0f}" width="{x_of(value) - left:.1f}" height="{bar - 2}" '
                    f'fill="{COLORS[i % len(COLORS)]}"/><text x="{x_of(value) + 4:.1f}" y="{y + 10:.0f}">{value:.0f}</text>'
                )
                y += bar
        parts.append(
            f'<text x="{left - 8}" y="{(start + y) / 2 + 4:.0f}" text-anchor="end">{shape.name}</text>'
        )
        if goals[shape.name]:
            x = x_of(goals[shape.name])
            parts.append(
                f'<line x1="{x:.1f}" y1="{start - 2:.0f}" x2="{x:.1f}" y2="{y:.0f}" stroke="black" stroke-dasharray="3"/>'
            )
        y += gap
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 30:.0f}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{y + 30:.0f}" fill="white"/>'
    )
    foot = (
        f'<text x="{width / 2:.0f}" y="{y + 18:.0f}" text-anchor="middle">'
        f"TFLOP/s, {'forward + backward' if phase == 'both' else phase}; dashed: goal</text></svg>"
    )
    return "\n".join([head, *parts, foot, ""])


def write(path: Path, record: Record, *, command: str) -> None:
    """Write path.json, path.md and path.svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(
        markdown(record, command=command, plot=path.with_suffix(".svg").name)
    )
    if any(found["rows"] for found in record["layers"].values()):
        path.with_suffix(".svg").write_text(svg(record))


def short(record: Record) -> str:
    """A table for the end of a log: one line per shape, then all verdicts."""
    lines = ["", "shape            pass      ours TFLOP/s  goal   peers"]
    for shape in SHAPES:
        rows = record["layers"].get(shape.name, {}).get("rows", ())
        for phase in PHASES:
            mine = speed_of(record, shape, OURS, phase)
            if mine is None:
                continue
            peers = ", ".join(
                f"{r['contender']} {r[f'{phase} TFLOP/s']:.0f}"
                for r in rows
                if r["contender"] != OURS
            )
            goal = shape.goals.of(phase)
            lines.append(f"{shape.name:16s} {phase:9s} {mine:12.0f}  {goal or 0:5.0f}  {peers}")
    for row in (*hard_lines(record), *other_lines(record)):
        if not row["verdict"].startswith("not raced"):
            lines.append(" ".join(row.values()))
    for row in record.get("properties", ()):
        lines.append(f"{row['property']}: {row['holds']} ({row['what was seen']})")
    return "\n".join(lines)
