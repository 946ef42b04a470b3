"""Tables of the planner as plain text, as wide as they must be and no wider than a terminal."""

from collections.abc import Sequence

from expertmesh.planner.validation import Judged, Summary, Validation

_UNITS = {
    "tokens_per_s": "tokens/s/GPU",
    "tflops": "TFLOPS/GPU",
    "live_gib": "GiB live",
    "device_gib": "GiB",
    "exchange_ms": "ms exchange",
    "compute_ms": "ms experts",
}
MISS = 0.4
"""Errors beyond this are named with their cause."""


def columns(rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Rows as lines with columns below one another.

    Args:
        rows: texts of equal number; the first row is the head.
        right: of each column "r" where its texts end below one another; what is missing is left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if right[place : place + 1] == "r" else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def validation_text(found: Validation) -> str:
    """All rows with their errors, what the constants are, and a summary of those that nothing was fitted on."""
    lines = []
    for title, rows in (
        ("training throughput (f: fitted on)", found.throughput),
        ("parts of a step", found.parts),
        ("peak memory", found.memory),
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
    ):
        s = Summary.of(rows, limit)
        lines.append(
            f"  {title:<23} {s.count:3} rows, median {100 * s.median:.0f} %,"
            f" within {100 * limit:.0f} %: {100 * s.within:.0f} %"
        )
    misses = [row for row in found.throughput if abs(row.time_error) > MISS]
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
