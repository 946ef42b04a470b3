"""What the calls brought back as Markdown, JSON and a plot. No torch."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import cell, markdown_table
from benchmarks.race.calls import CALLS
from benchmarks.race.peers import listed
from benchmarks.race.plot import svg
from benchmarks.race.shapes import GOAL_SHAPES, PHASES, SHAPES, RaceShape, chosen
from benchmarks.race.verdicts import (
    OURS,
    Record,
    decode_rows,
    goal_of,
    goals,
    hard_lines,
    other_lines,
    speed_of,
)

from benchmarks.race import model

METHOD = (
    "BF16, router included, balanced random routing. Medians of interleaved rounds; before every timed part the L2 is "
    "flushed and the device waits 2 ms, so that launches do not count where a contender does not wait for the device; "
    "weights are rotated where two sets fit. Operations: 6 T K D F forward for gated experts, 4 T K D F for plain "
    "ones, twice that backward. Every contender was checked at full size against an FP64 oracle on sampled tokens and "
    "experts (`off by`: largest relative distance) before its time counts."
)
KERNELS_NOTE = (
    "Each launch alone, with a cold L2; `router` is all before the experts (product, choice, weights), `maps` the row "
    "orders. Operations and bytes as in docs/kernels.md; a prediction is the model's (benchmarks/race/model.py) or a "
    "written one."
)
PREDICTIONS_NOTE = """\
Made by `benchmarks/race/model.py` before any run, and frozen in `benchmarks/race/predictions.json` (H200). Tiles are
those of the default table; padding costs 0.28 of a tile per expert (tails have a path of half the height). A wave is
one tile per multiprocessor (132). A kernel takes waves x (operations of a tile at the inner loop's rate + what nothing
overlaps), or its bytes at 4.1 TB/s and 5 us per launch. `make gpu` writes this page, its last columns filled in, to
`OUT/predictions.md`."""
FORMATS_NOTE = (
    "Experts alone without gradients, at Qwen3-30B-A3B's sizes, row orders included, a cold L2. `of the bandwidth "
    "floor`: bytes of the live experts at the copy's rate over the time. `off by`: relative distance from the product "
    "of the widened matrices, checked before the time counts."
)
_WHOLE = ("machine", "metadata", "skew", "decode", "properties", "training", "engine steps")
_WHOLE += ("deterministic layer", "lora step", "full step", "paged experts")
_BY_NAME = {"layers": "layers ", "kernels": "kernels ", "sweep": "sweep ", "tests": "tests of "}
_BY_NAME |= {"formats": "formats ", "exact RL": "exact RL "}


def load(folders: Sequence[Path]) -> Record:
    """Merge what the calls wrote into these folders; of a part that ran twice the later folder's result counts.

    Returns:
        {"machine", "metadata", ...: results; "layers", "kernels", "sweep", "tests": results by name; "parts": how each
        ended}.
    """
    record: Record = {key: {} for key in _BY_NAME} | {"parts": []}
    for folder in folders:
        for call in CALLS:
            file = folder / f"{call}.json"
            if not file.exists():
                continue
            for name, outcome in json.loads(file.read_text())["parts"].items():
                record["parts"].append(
                    {"call": call, "part": name, "state": outcome["state"], "seconds": outcome["seconds"],
                     "error": outcome.get("error", "")}
                )  # fmt: skip
                if not outcome["result"]:
                    continue
                if name in _WHOLE:
                    record[name] = outcome["result"]
                for key, prefix in _BY_NAME.items():
                    if name.startswith(prefix):
                        record[key][name.removeprefix(prefix)] = outcome["result"]
    return record


def _section(title: str, rows: Sequence[dict[str, Any]], *notes: str) -> list[str]:
    return [f"## {title}", *notes, markdown_table(rows)] if rows else []


def describe(shape: RaceShape) -> str:
    """Sizes in words."""
    return (
        f"{shape.title}: T={shape.num_tokens}, D={shape.dim}, F={shape.hidden_dim}, "
        f"E={shape.num_experts}, K={shape.top_k}, {shape.activation}"
    )


def markdown(record: Record, *, plot: str) -> str:
    """The whole report."""
    machine = record.get("machine") or {}
    text = ["# The layer against others on one GPU"]
    if machine:
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        text.append(f"{machine['gpu']}; {machine['cpu']}; {machine['clock']}; {versions}; {machine['date']}.")
    text.append(METHOD)
    if "gemm_flops_per_s" in machine:
        text.append(
            f"Ceilings measured in the same run: copy {machine['copy_bytes_per_s'] / 1e12:.2f} TB/s (read and "
            f"written), BF16 product of {machine['gemm_size']}^3 {machine['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s."
        )
    if record["layers"]:
        text += _section("Hard lines", hard_lines(record))
    text += _section("Skew and decoding", other_lines(record))
    text += _section("Goals", goals(record))
    if record["layers"]:
        peers = [f"* {peer.name}: {peer.what}." for peer in listed()[0]]
        text += ["## All contenders", f"![TFLOP/s]({plot})", "\n".join(peers)]
    for shape in SHAPES:
        found = record["layers"].get(shape.name)
        if found:
            text += [f"### {describe(shape)}", *found["notes"]]
            text += [markdown_table(found["rows"])] if found.get("rows") else []
            alone = found.get("experts")
            text += ["Experts alone, the choice given:", markdown_table(alone)] if alone else []
    text += _kernels(record)
    text += _section("What must hold beside speed", record.get("properties") or ())
    of_engine = record.get("engine steps") or {}
    text += _section("Steps of the engine", of_engine.get("rows") or ())
    text += _section("What its captured steps must keep", of_engine.get("checks") or ())
    text += _section("Tests", _tests(record))
    text += _section("Maps", record.get("metadata") or ())
    text += _section("Skewed routing", record.get("skew") or ())
    text += _section("Decoding", decode_rows(record), "One CUDA graph of a step without gradients.")
    text += _section("Training", record.get("training") or ())
    for title, note, rows in _workloads(record):
        text += _section(title, _alike(rows), *([note] if note else []))
    text += _sweep(record)
    text += _section("How the parts ended", record["parts"])
    return "\n\n".join(text) + "\n"


def _kernels(record: Record) -> list[str]:
    text = []
    for name, found in record["kernels"].items():
        if found.get("kernels"):
            step = ", ".join(f"{phase} {ms:.2f} ms" for phase, ms in found.get("step", {}).items())
            table = markdown_table(_alike(found["kernels"]))
            text += [f"### {name}", f"{found['check']}. Whole layer: {step}.", table]
    return ["## Kernels", KERNELS_NOTE, *text] if text else []


def _alike(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the keys of all."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key, "") for key in keys} for row in rows]


def _workloads(record: Record) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Title, note and rows of what users run; a row that failed has a column that says so."""
    adapters, whole, paged = (record.get(name) or {} for name in ("lora step", "full step", "paged experts"))
    memory = [row for found in (adapters, whole, paged) for row in found.get("memory", ())]
    steps = [row for found in (adapters, whole) for row in found.get("rows", ())]
    kinds = "Peak of tensors after the first step; an engine's after it warmed up. Predicted by the planner."
    exact = "The largest difference of a token's log-probability in training from its rollout's: it must be 0."
    by_name = {key: [row for rows in record.get(key, {}).values() for row in rows] for key in ("formats", "exact RL")}
    return [
        ("Narrow experts", FORMATS_NOTE, by_name["formats"]),
        ("The price of deterministic mode", "", list(record.get("deterministic layer") or ())),
        ("A step with adapters", "BF16, 4 layers of Qwen3-30B-A3B's sizes, 4 x 2,048 tokens.", steps),
        ("Exact reinforcement learning", exact, by_name["exact RL"]),
        ("Paged experts", "Decoding; `slots`: experts of a layer on the GPU.", list(paged.get("rows", ()))),
        ("Answers with paged experts", "", list(paged.get("checks", ()))),
        ("Memory", kinds, memory),
    ]


def _tests(record: Record) -> list[dict[str, Any]]:
    return [
        {"tests": name, "passed": found["passed"], "skipped": found["skipped"],
         "failed": ", ".join(one["test"] for one in found["failed"]) or "none"}
        for name, found in record["tests"].items()
    ]  # fmt: skip


def _sweep(record: Record) -> list[str]:
    rows = []
    for found in record["sweep"].values():
        for row in found["rows"]:
            tile = row.get("tile", {})
            cut = "x".join(str(tile.get(f"block_{d}", "")) for d in "mnk")
            rows.append(
                {"shape": found["shape"]["name"], "GEMM": found["gemm"], "candidate": row["candidate"], "tile": cut,
                 "us": row.get("us", ""), "of today": row.get("of today", ""), "spills": row.get("spills", ""),
                 "error": row.get("error", "")}
            )  # fmt: skip
    return _section("Tiles", rows, "Each GEMM alone, beside today's tile in the same rounds.")


def predictions(record: Record) -> str:
    """The predictions of the shapes with goals, per kernel with their costs, and beside them what a record has
    measured."""
    text = ["# What the model predicts", PREDICTIONS_NOTE]
    for shape in chosen(GOAL_SHAPES):
        rows = record["kernels"].get(shape.name, {}).get("kernels", ())
        measured = {row["kernel"]: row["us"] for row in rows}
        text += [f"## {shape.name}", describe(shape), markdown_table(model.lines(shape, measured))]
        text.append("; ".join(_pass(shape, phase, measured) for phase in ("forward", "backward")))
    return "\n\n".join(text) + "\n"


def _pass(shape: RaceShape, phase: str, measured: dict[str, float]) -> str:
    """One pass in words: the sum of its kernels as TFLOP/s, predicted, wanted, measured."""
    kernels = model.FORWARD if phase == "forward" else model.BACKWARD
    expected = sum(model.predicted(shape, kernel).microseconds for kernel in kernels)
    text = (
        f"{phase}: {expected / 1e3:.2f} ms, {shape.flops(phase) / expected / 1e6:.0f} TFLOP/s (goal "
        f"{shape.goals.of(phase):.0f})"
    )
    if all(kernel in measured for kernel in kernels):
        seen = sum(measured[kernel] for kernel in kernels)
        text += f", measured {seen / 1e3:.2f} ms, {shape.flops(phase) / seen / 1e6:.0f} TFLOP/s"
    return text


def default_name(record: Record) -> str:
    """layer_h200_202611, ..."""
    words = ((record.get("machine") or {}).get("gpu") or "").split(",")[0].lower().split()
    gpu = next((w for w in words if any(c.isdigit() for c in w)), "cpu_dry_run")
    return f"layer_{gpu}_{time.strftime('%Y%m')}"


def write(folders: Sequence[Path], *, name: str | None = None) -> str:
    """Write NAME.json, NAME.md and NAME.svg into the first folder, from what the calls wrote into all; give the short
    table."""
    record = load(folders)
    path = folders[0] / (name or default_name(record))
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(record, plot=path.with_suffix(".svg").name))
    if any(found.get("rows") for found in record["layers"].values()):
        path.with_suffix(".svg").write_text(svg(record))
    return short(record)


def short(record: Record) -> str:
    """A table for the end of a log: one line per kernel and shape, then all verdicts."""
    lines = []
    for name, found in record["kernels"].items():
        lines.append(f"{name}: {found['check']}")
        for row in found.get("kernels", ()):
            expected = f"{row['predicted us']:9.0f} us predicted" if "predicted us" in row else ""
            lines.append(f"  {row['kernel']:32s} {row['us']:9.0f} us {expected}")
    for shape in SHAPES:
        rows = (record["layers"].get(shape.name) or {}).get("rows", ())
        for phase in PHASES:
            mine = speed_of(record, shape, OURS, phase)
            if mine is None:
                continue
            theirs = ", ".join(f"{r['contender']} {r[f'{phase} TFLOP/s']:.0f}" for r in rows if r["contender"] != OURS)
            goal = goal_of(record, shape, phase) or 0.0
            lines.append(f"{shape.name:12s} {phase:9s} {mine:6.0f} TFLOP/s, goal {goal:4.0f}; {theirs}")
    judged = [*hard_lines(record), *other_lines(record)] if record["layers"] else other_lines(record)
    for row in judged:
        if not row["verdict"].startswith("not raced"):
            lines.append(" ".join(row.values()))
    for row in record.get("properties") or ():
        lines.append(f"{row['property']}: {row['holds']} ({row['what was seen']})")
    for row in _tests(record):
        lines.append(f"tests of {row['tests']}: {row['passed']} passed, failed: {row['failed']}")
    for title, _, rows in _workloads(record):
        lines += [f"{title}: " + ", ".join(f"{key} {cell(value)}" for key, value in row.items()) for row in rows]
    return "\n".join(lines)
