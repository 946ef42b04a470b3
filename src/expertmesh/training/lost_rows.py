"""Detection of rows missing from a run's metrics files, after a full disk, a crash or an edit."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from expertmesh.training.metrics import read_lines, read_metrics

_MOST_RANGES = 3


def lost_rows(metrics: Path, experts: Path, *, first: int, last: int) -> str:
    """Warning, in one line, about missing rows in the files of a resumed run; "" if none are missing.

    Args:
        metrics: metrics.jsonl, with a row for each step.
        experts: experts.jsonl, with a row for some steps of a run with experts.
        first: number of steps before this run's first one.
    """
    if last <= first:
        return ""
    rows = read_metrics(metrics)
    missing = sorted(set(range(first + 1, last + 1)) - {row["step"] for row in rows})
    said = []
    if missing:
        said.append(f"{metrics.name} lacks {len(missing)} of {last - first} steps ({_ranges(missing)})")
    has_experts = any(row.get("load_imbalance", 1.0) != 1.0 for row in rows)
    if _has_hole(experts, first=first, last=last, must_begin=has_experts and first == 0):
        said.append(f"{experts.name} lacks rows")
    if not said:
        return ""
    where = f"lost, cut short or damaged in {metrics.parent}"
    return f"warning: {' and '.join(said)}: {where}; the run goes on, its curves have a hole"


def _ranges(steps: Sequence[int]) -> str:
    """Text such as "1 to 30, 40" of ascending numbers."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in found[:_MOST_RANGES]]
    return ", ".join(texts) + (", ..." if len(found) > _MOST_RANGES else "")


def _has_hole(path: Path, *, first: int, last: int, must_begin: bool) -> bool:
    """Whether a line is damaged, or more steps are missing before the first or after the last row than between any two.

    The distance of rows depends on the total number of steps, which may have changed.
    """
    rows, lines = read_lines(path), path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    steps = sorted({row["step"] for row in rows if first < row["step"] <= last})
    if len(rows) < len(lines) or (must_begin and steps[:1] != [first + 1]):
        return True
    usual = max((b - a for a, b in pairwise(steps)), default=last - first)
    return bool(steps) and max(steps[0] - first, last - steps[-1] + 1) > usual
