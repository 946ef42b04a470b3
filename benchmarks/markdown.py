"""Rows as a Markdown table. No torch."""

from collections.abc import Sequence
from typing import Any


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Give rows with equal keys as a Markdown table."""
    keys = list(rows[0])
    lines = [" | ".join(keys), " | ".join("---" for _ in keys)]
    lines += [" | ".join(cell(row[key]) for key in keys) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, float):
        return f"{value:.3g}" if value < 10 else f"{value:.1f}"
    return str(value)
