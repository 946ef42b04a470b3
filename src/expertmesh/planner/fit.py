"""The eight constants of the time model, fitted on named rows."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from expertmesh.costs.step_time import BOUNDS, USUAL, Efficiency, RawStep, step_seconds
from expertmesh.planner.published import Point

MOST = 0.7
"""A row's error beyond twice counts no more: one outlier decides nothing."""
PRIOR = 0.05
"""Weight of the distance from `USUAL`, over the width of the bounds: rows cannot tell the constants apart."""
_FIRST_STEP, _LAST_STEP = 0.3, 0.01


def fit(points: Sequence[Point]) -> Efficiency:
    """The constants with the least mean error (absolute logarithm), within their bounds.

    A pattern search from `USUAL` over single constants and pairs: deterministic, about a second for 30 rows.

    Args:
        points: rows of training throughput.
    """
    rows = [(point.raw(), point.measured_s) for point in points]
    best, cost, step = USUAL, _cost(rows, USUAL), _FIRST_STEP
    while step > _LAST_STEP:
        has_moved = False
        for move in _moves(step):
            changed = _moved(best, move)
            found = _cost(rows, changed)
            if found < cost - 1e-6:
                best, cost, has_moved = changed, found, True
        if not has_moved:
            step /= 2
    return best


def _moves(step: float) -> list[dict[str, float]]:
    both = (1 + step, 1 / (1 + step))
    moves = [{name: factor} for name in BOUNDS for factor in both]
    for one, other in combinations(BOUNDS, 2):
        moves += [{one: a, other: b} for a in both for b in both]
    return moves


def _moved(e: Efficiency, move: dict[str, float]) -> Efficiency:
    values = {}
    for name, factor in move.items():
        least, most = BOUNDS[name]
        values[name] = min(most, max(least, getattr(e, name) * factor))
    return replace(e, **values)


def _cost(rows: Sequence[tuple[RawStep, float]], e: Efficiency) -> float:
    errors = (abs(math.log(step_seconds(raw, e).total_s / measured)) for raw, measured in rows)
    error = sum(min(each, MOST) for each in errors) / max(len(rows), 1)
    return error + PRIOR * sum(
        (math.log(getattr(e, name) / getattr(USUAL, name)) / math.log(most / least)) ** 2
        for name, (least, most) in BOUNDS.items()
    )
