"""Tables of the planner's validation, and of claimed speed-ups."""

from benchmarks.planner.claims import claims
from benchmarks.planner.validation import Judged, Summary, Validation

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
"""Absolute error beyond which a row is listed with its cause."""


def validation_text(found: Validation) -> str:
    """All rows with their errors, the constants, and a summary of the errors."""
    lines = []
    for title, rows in (
        ("training throughput (f: fitted on)", found.throughput),
        ("parts of a step", found.parts),
        ("peak memory", found.memory),
        ("generation (nothing is fitted, most batches are guessed)", found.serving),
    ):
        table: list[tuple[str, ...]] = [("row", "", "stack", "measured", "model", "error", "unit")]
        table += [_row(row) for row in rows]
        lines += [title, *("  " + line for line in columns(table, right="lllrrrl")), ""]
    lines += ["constants"]
    lines += [f"  {name:<14} {value:.4g}" for name, value in vars(found.efficiency).items()]
    lines += ["", "absolute errors"]
    for title, rows, limit in (
        ("throughput, not fitted", found.held_out, 0.4),
        ("throughput, fitted", found.fitted, 0.4),
        ("parts of a step", found.parts, 0.4),
        ("peak memory", found.memory, 0.15),
        ("generation", found.serving, 0.4),
    ):
        s = Summary.of(rows, limit)
        lines.append(
            f"  {title:<23} {s.count:3} rows, median {100 * s.median:.0f} %,"
            f" within {100 * limit:.0f} %: {100 * s.within:.0f} %"
        )
    misses = [row for row in (*found.throughput, *found.serving) if abs(row.time_error) > MISS]
    if misses:
        lines += ["", "rows beyond 40 %, and why"]
        lines += [f"  {row.point.name}: {row.point.cause or 'not known'}" for row in misses]
    return "\n".join(lines)


def _row(row: Judged) -> tuple[str, ...]:
    point = row.point
    return (
        point.name,
        "f" if point.is_fitted else "",
        point.work.stack,
        f"{point.measured:,.4g}" if point.measured < 1000 else f"{point.measured:,.0f}",
        f"{row.predicted:,.4g}" if row.predicted < 1000 else f"{row.predicted:,.0f}",
        f"{100 * row.error:+.0f} %",
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
