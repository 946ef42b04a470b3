"""Fit of the time model's eight constants on published measurements."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from expertmesh.costs.step_time import BOUNDS, USUAL, Efficiency, RawStep, step_seconds
from expertmesh.planner.published import PublishedMeasurement, published_points

MOST, BEYOND = 0.7, 0.1
"""Log error of a row up to which it counts fully (a factor of 2), and share of the excess that counts: outliers weigh
less."""
PRIOR = 0.02
"""Weight of the squared distance from `USUAL` over the width of the bounds, because rows do not determine all
constants; of 0.02, 0.05, 0.1 and 0.2 the one that leaves rows of left-out sources closest (17.6, 18.3, 18.7 and 18.5
%)."""
_FIRST_STEP, _LAST_STEP = 0.3, 0.01
OWN_WEIGHT = 5
"""Weight of a user's own row in the fit."""


Row = tuple[RawStep, float]
"""(modelled seconds of a step at the hardware's peaks, measured seconds)."""
Bounds = Mapping[str, tuple[float, float]]


def fit(points: Sequence[PublishedMeasurement]) -> Efficiency:
    """Constants with the least mean error on rows of training throughput, within `BOUNDS`; see `fit_rows`."""
    return fit_rows([(point.raw(), point.measured_s) for point in points])


def fit_with(own: Sequence[PublishedMeasurement]) -> Efficiency:
    """Constants fitted on the marked published rows and on a user's own, which have more weight."""
    published = [point for point in published_points() if point.is_fitted]
    return fit([*published, *(list(own) * OWN_WEIGHT)])


def fit_rows(rows: Sequence[Row], *, usual: Efficiency = USUAL, bounds: Bounds = BOUNDS) -> Efficiency:
    """The constants with the least mean error (absolute logarithm), within their bounds.

    A pattern search over single constants and pairs: deterministic, about a second for 30 rows.
    """
    best, cost, step = usual, _cost(rows, usual, usual, bounds), _FIRST_STEP
    moves = partial(_moves, bounds)
    while step > _LAST_STEP:
        has_moved = False
        for move in moves(step):
            changed = _moved(best, move, bounds)
            found = _cost(rows, changed, usual, bounds)
            if found < cost - 1e-6:
                best, cost, has_moved = changed, found, True
        if not has_moved:
            step /= 2
    return best


def _moves(bounds: Bounds, step: float) -> list[dict[str, float]]:
    both = (1 + step, 1 / (1 + step))
    moves = [{name: factor} for name in bounds for factor in both]
    for one, other in combinations(bounds, 2):
        moves += [{one: a, other: b} for a in both for b in both]
    return moves


def _moved(e: Efficiency, move: Mapping[str, float], bounds: Bounds) -> Efficiency:
    values = {}
    for name, factor in move.items():
        least, most = bounds[name]
        values[name] = min(most, max(least, getattr(e, name) * factor))
    return replace(e, **values)


def _cost(rows: Sequence[Row], e: Efficiency, usual: Efficiency, bounds: Bounds) -> float:
    errors = (abs(math.log(step_seconds(raw, e).total_s / measured)) for raw, measured in rows)
    counted = (min(each, MOST) + BEYOND * max(each - MOST, 0.0) for each in errors)
    error = sum(counted) / max(len(rows), 1)
    return error + PRIOR * sum(
        (math.log(getattr(e, name) / getattr(usual, name)) / math.log(most / least)) ** 2
        for name, (least, most) in bounds.items()
    )
