"""Tables of the planner's validation, and of claimed speed-ups."""

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.planner.claims import claims
from benchmarks.planner.validation import Judged, Summary, Validation, source_of

from expertmesh.costs import memory, rank_layout, step_time
from expertmesh.costs.step_time import step_seconds
from expertmesh.planner import serving_layout as serving
from expertmesh.planner.search_result import ERROR_BAR, MEMORY_BAR
from expertmesh.planner.serve import SERVE_BAR
from expertmesh.planner.table import columns

_UNITS = {
    "tokens_per_s": "tokens/s/GPU",
    "tflops": "TFLOPS/GPU",
    "live_gib": "GiB live",
    "device_gib": "GiB",
    "exchange_ms": "ms exchange",
    "compute_ms": "ms experts",
    "token_ms": "ms per token",
}
MISS = 0.4
"""Absolute logarithm of the ratio beyond which a row is listed with its cause."""
MOVES = 0.02
"""Relative change of a row's time per relative change of a constant from which the row says something about it."""
SET: dict[str, tuple[object, str]] = {
    "HBM": (step_time.HBM, "ai-dynamo/aiconfigurator: element-wise kernels"),
    "ATTENTION": (step_time.ATTENTION, "assumed for causal kernels"),
    "FP8_SHARE": (step_time.FP8_SHARE, "by hand, Megatron-Bridge's rows in FP8 in sight"),
    "FP8_LAUNCHES": (step_time.FP8_LAUNCHES, "assumed: a quantising kernel for each operand"),
    "ADAM_BYTES": (step_time.ADAM_BYTES, "counted"),
    "FRAGMENTS": (memory.FRAGMENTS, "assumed, with expandable segments"),
    "CONTEXT_BYTES": (memory.CONTEXT_BYTES, "assumed"),
    "NCCL_BYTES": (memory.NCCL_BYTES, "ai-dynamo/aiconfigurator: 342 to 392 MiB"),
    "IMBALANCE": (rank_layout.IMBALANCE, "assumed: natural routing has 1.1 to 1.25"),
    "ONE_HOT_MASK_BYTES": (rank_layout.ONE_HOT_MASK_BYTES, "rows tu-fairseq-*: Tutel's table 5"),
    "eager_s": (serving.Overheads().eager_s, "row tt-qwen3-30b-a100"),
    "fused_s": (serving.Overheads().fused_s, "row ix-r1-8"),
    "sequence_s": (serving.Overheads().sequence_s, "row ix-gpt-oss-120b-256"),
    "EXCHANGE_S": (serving.EXCHANGE_S, "DeepEP's README: low-latency kernels on 8 ranks"),
    "REDUCE_S": (serving.REDUCE_S, "ai-dynamo/aiconfigurator: 15.7 us on 8 H100"),
    "WORKSPACE_BYTES": (serving.WORKSPACE_BYTES, "ai-dynamo/aiconfigurator"),
}
"""Constants that are set, with what they were set by."""


def validation_text(found: Validation) -> str:
    """All rows with their errors, the constants with their rows, and a summary of the errors by set."""
    lines = []
    for title, rows in (
        ("training throughput (f: fitted on)", found.throughput),
        ("training throughput, later rows", found.later),
        ("parts of a step", found.parts),
        ("peak memory", found.memory),
        ("generation (f: its overheads were set with it in sight)", found.serving),
    ):
        table: list[tuple[str, ...]] = [("row", "", "stack", "measured", "model", "log %", "unit")]
        table += [_row(row) for row in rows]
        lines += [title, *("  " + line for line in columns(table, right="lllrrrl")), ""]
    lines += ["constants", *_constants(found), "", "errors: |log(predicted / measured)|"]
    known = {row.point.name for row in found.serving_left_out}
    for title, rows, bar in (
        ("training, fitted", found.fitted, ERROR_BAR),
        ("training, in sight", found.in_sight, ERROR_BAR),
        ("training, later rows", found.later, ERROR_BAR),
        ("training, left out by source", found.left_out, ERROR_BAR),
        ("parts of a step", found.parts, ERROR_BAR),
        ("peak memory, in sight", found.memory, MEMORY_BAR),
        (
            "decoding, batch known, in sight",
            [row for row in found.serving if row.point.name in known],
            SERVE_BAR,
        ),
        ("decoding, left out by source", found.serving_left_out, SERVE_BAR),
    ):
        lines.append(f"  {title:<32} {_summary(rows, bar)}")
    lines += ["", "left out, source by source"]
    by_source: dict[str, list[Judged]] = {}
    for row in found.left_out:
        by_source.setdefault(source_of(row.point), []).append(row)
    for source, rows in by_source.items():
        lines.append(f"  {source:<32} {_summary(rows, ERROR_BAR)}")
    judged = (*found.throughput, *found.later, *found.serving, *found.memory)
    misses = [row for row in judged if abs(row.log_ratio) > MISS]
    if misses:
        lines += ["", f"rows beyond {MISS:g}, and why"]
        lines += [f"  {row.point.name}: {row.point.cause or 'not known'}" for row in misses]
    return "\n".join(lines)


def _summary(rows: Sequence[Judged], bar: tuple[float, float]) -> str:
    s = Summary.of(rows, bar)
    return (
        f"{s.count:3} rows, median {100 * s.median:.1f} %,"
        f" {100 * s.within:.0f} % within the bar of {bar[0]:g} to {bar[1]:g}"
    )


def _constants(found: Validation) -> list[str]:
    """Lines on each constant: its value, and rows that it was fitted on, or what it was set by."""
    lines = []
    for name, value in vars(found.efficiency).items():
        more = replace(found.efficiency, **{name: 1.01 * value})
        moved = {}
        for row in found.fitted:
            raw = row.point.raw()
            ratio = step_seconds(raw, more).total_s / step_seconds(raw, found.efficiency).total_s
            moved[row.point.name] = abs(math.log(ratio)) / math.log(1.01)
        rows = sorted((n for n, by in moved.items() if by > MOVES), key=lambda n: -moved[n])
        most = f"most {', '.join(rows[:3])}" if rows else "and only its prior"
        lines.append(f"  {name:<20} {value:<10.4g} {len(rows)} of {len(moved)} fitted rows, {most}")
    return lines + [f"  {name:<20} {value:<10.4g} {by}" for name, (value, by) in SET.items()]


def _row(row: Judged) -> tuple[str, ...]:
    point = row.point
    return (
        point.name,
        "f" if point.is_fitted else "",
        point.work.stack,
        f"{point.measured:,.4g}" if point.measured < 1000 else f"{point.measured:,.0f}",
        f"{row.predicted:,.4g}" if row.predicted < 1000 else f"{row.predicted:,.0f}",
        f"{100 * row.log_ratio:+.0f}",
        _UNITS[point.unit],
    )


def claims_text() -> str:
    """Claimed speed-ups with the model's ratios, or with settings that would make them true; see `planner.claims`."""
    rows: list[tuple[str, ...]] = [("claim", "claimed", "model", "")]
    rows += [
        (
            claim.name,
            f"{claim.claimed:g} x",
            "" if claim.found is None else f"{claim.found:.2f} x",
            claim.assumed,
        )
        for claim in claims()
    ]
    return "\n".join(columns(rows, right="lrrl"))
