"""Validation of the models of time and memory: errors on published measurements, fitted, in sight, and left out by
source."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any, TypeVar

from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.memory import GIB, peak_memory
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.step_time import Efficiency, step_seconds
from expertmesh.costs.weight_formats import Weights
from expertmesh.planner.fit import fit, fit_with
from expertmesh.planner.published import (
    PublishedMeasurement,
    published_models,
    published_points,
    published_serving,
)
from expertmesh.planner.serving_layout import Overheads, Serving

_T = TypeVar("_T")
EAGER_S, FUSED_S, SEQUENCE_S = (
    (1e-4, 1.2e-4, 1.4e-4),
    (4e-5, 6e-5, 8e-5, 1e-4, 1.2e-4),
    (2e-5, 5e-5, 8e-5, 1.1e-4, 1.4e-4),
)
"""Values that are tried of the overheads of generation."""


@dataclass(frozen=True)
class Judged:
    """A row with the model's prediction.

    Attributes:
        point: the row.
        predicted: prediction in the row's unit.
    """

    point: PublishedMeasurement
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured value, minus one; for a rate, above 0 is too optimistic."""
        return self.predicted / self.point.measured - 1

    @property
    def log_ratio(self) -> float:
        """Logarithm of predicted over measured time, or memory: symmetrical, so that optimism counts as much."""
        is_rate = self.point.unit in ("tokens_per_s", "tflops")
        found = math.log(self.predicted / self.point.measured)
        return -found if is_rate else found


@dataclass(frozen=True)
class Summary:
    """Errors of several rows, as absolute logarithms of the ratio.

    Attributes:
        count: number of rows.
        median: median error.
        within: share of rows whose measured value lies within the bar.
        low: the tenth percentile of measured over predicted.
        high: the ninetieth percentile.
    """

    count: int
    median: float
    within: float
    low: float
    high: float

    @staticmethod
    def of(rows: Sequence[Judged], bar: tuple[float, float] = (0.0, math.inf)) -> "Summary":
        """Summary of some rows, at least one.

        Args:
            rows: the rows.
            bar: measured over predicted, from and to.
        """
        ratios = sorted(math.exp(-row.log_ratio) for row in rows)
        last = len(ratios) - 1
        return Summary(
            count=len(rows),
            median=median(abs(row.log_ratio) for row in rows),
            within=sum(bar[0] <= ratio <= bar[1] for ratio in ratios) / len(ratios),
            low=ratios[round(0.1 * last)],
            high=ratios[round(0.9 * last)],
        )


@dataclass(frozen=True)
class Validation:
    """The fitted constants, and all rows with predictions.

    Attributes:
        efficiency: the fitted constants.
        throughput: rows of training throughput that were in sight when the terms of the model were settled.
        later: rows of training throughput that came later.
        left_out: all of them, each by constants that were fitted without its source.
        memory: rows of peak memory; nothing is fitted on them.
        parts: rows of parts of a step; nothing is fitted on them.
        serving: rows of generation.
        serving_left_out: those whose batch is known, each by overheads that were set without its source.
    """

    efficiency: Efficiency
    throughput: tuple[Judged, ...]
    later: tuple[Judged, ...]
    left_out: tuple[Judged, ...]
    memory: tuple[Judged, ...]
    parts: tuple[Judged, ...]
    serving: tuple[Judged, ...]
    serving_left_out: tuple[Judged, ...]

    @property
    def fitted(self) -> tuple[Judged, ...]:
        """Rows of throughput on which the constants are fitted."""
        return tuple(row for row in self.throughput if row.point.is_fitted)

    @property
    def in_sight(self) -> tuple[Judged, ...]:
        """Rows of throughput that were in sight and that no constant is fitted on."""
        return tuple(row for row in self.throughput if not row.point.is_fitted)


def validate(own: Sequence[PublishedMeasurement] = ()) -> Validation:
    """Fit the constants on the marked rows and the user's own, and predict all rows.

    Args:
        own: measurements beside the published ones, all for the fit.

    Example:
        >>> from benchmarks.planner.validation import Summary, validate
        >>> Summary.of(validate().left_out).median < 0.2
        True
    """
    points = (*published_points(), *own)
    efficiency = fit_with(own)
    later = published_points("later")

    def judged(rows: Sequence[PublishedMeasurement]) -> tuple[Judged, ...]:
        return tuple(Judged(row, predicted(row, efficiency)) for row in rows)

    return Validation(
        efficiency,
        judged(points),
        judged(later),
        left_out((*published_points(), *later), efficiency),
        judged(published_points("memory")),
        judged(published_points("parts")),
        judged_serving(published_serving(), Overheads()),
        serving_left_out(),
    )


def source_of(row: PublishedMeasurement) -> str:
    """Letters of a row's source, without its release."""
    return row.source.split()[0]


def left_out(rows: Sequence[PublishedMeasurement], usual: Efficiency) -> tuple[Judged, ...]:
    """Rows with predictions by constants that are fitted on the marked rows of all other sources.

    Args:
        rows: the rows.
        usual: constants that are fitted on all marked rows, for sources without one.
    """
    marked = [point for point in published_points() if point.is_fitted]

    def without(source: str) -> Efficiency:
        others = [point for point in marked if source_of(point) != source]
        return usual if len(others) == len(marked) else fit(others)

    return _by_source(rows, source_of, lambda source: without(source), predicted_row)


def predicted_row(row: PublishedMeasurement, efficiency: Efficiency) -> Judged:
    """A row with its prediction."""
    return Judged(row, predicted(row, efficiency))


def _by_source(
    rows: Iterable[_T],
    source: Callable[[_T], str],
    without: Callable[[str], Any],
    judge: Callable[[_T, Any], Judged],
) -> tuple[Judged, ...]:
    every = list(rows)
    constants = {name: without(name) for name in dict.fromkeys(map(source, every))}
    return tuple(judge(row, constants[source(row)]) for row in every)


def judged_serving(rows: Mapping[str, Mapping[str, Any]], overheads: Overheads) -> tuple[Judged, ...]:
    """Rows of generation with predictions."""
    return tuple(_judged_serving(item, overheads) for item in rows.items())


def _judged_serving(item: tuple[str, Mapping[str, Any]], overheads: Overheads) -> Judged:
    name, v = item
    way = replace(serving_of(v), overheads=overheads)
    point = PublishedMeasurement(
        name,
        v["source"],
        v["model"],
        way.sizes,
        way.cluster,
        RankLayout(way.cluster.num_gpus),
        Workload(v["context"], stack="fused" if v["fused"] else "eager"),
        v["measured"],
        unit="token_ms",
        is_fitted=v.get("fit", False),
        guesses=tuple(v.get("guess", ())),
        cause=v.get("cause", ""),
    )
    return Judged(point, 1e3 * way.seconds.total_s)


def known_serving() -> dict[str, Mapping[str, Any]]:
    """Rows of generation whose batch is known."""
    rows = published_serving()
    return {name: row for name, row in rows.items() if "batch" not in row.get("guess", ())}


def overheads_of(rows: Mapping[str, Mapping[str, Any]]) -> Overheads:
    """Overheads of generation with the least mean error on some rows, of those that are tried."""
    tried = (Overheads(*values) for values in product(EAGER_S, FUSED_S, SEQUENCE_S))
    return min(tried, key=lambda o: sum(abs(row.log_ratio) for row in judged_serving(rows, o)))


def serving_left_out() -> tuple[Judged, ...]:
    """Rows of generation whose batch is known, with predictions by overheads of all other sources."""
    rows = known_serving()

    def without(source: str) -> Overheads:
        return overheads_of({name: row for name, row in rows.items() if row["source"] != source})

    return _by_source(rows.items(), lambda item: item[1]["source"], without, _judged_serving)


def serving_of(v: Mapping[str, Any]) -> Serving:
    """Layout of a row of generation."""
    cluster = find_cluster(v["cluster"])
    if "memory_gb_per_s" in v:
        device = cluster.device.model_copy(update={"hbm_gb_per_s": v["memory_gb_per_s"]})
        cluster = cluster.model_copy(update={"device": device})
    return Serving(
        published_models()[v["model"]],
        cluster,
        v["batch"],
        v["context"],
        v["tp"],
        v["ep"],
        weights=Weights.of(v.get("weights", "bfloat16")),
        fused=v["fused"],
        redundant=v.get("redundant", 0),
        overlaps=v.get("overlaps", False),
    )


def predicted(point: PublishedMeasurement, efficiency: Efficiency) -> float:
    """The model's prediction for a row, in the row's unit."""
    if point.unit in ("live_gib", "device_gib"):
        memory = peak_memory(point.sizes, point.layout, point.work, stage=point.stage)
        found = memory.live_bytes if point.unit == "live_gib" else memory.device_bytes
        return found / GIB
    seconds = step_seconds(point.raw(), efficiency)
    if point.unit == "exchange_ms":
        return 1e3 * (seconds.exchange_inside_s + seconds.exchange_across_s)
    if point.unit == "compute_ms":
        return 1e3 * (seconds.grouped_s + seconds.element_s)
    return point.measured * point.measured_s / seconds.total_s
