"""Validation of the models of time and memory: their errors on published measurements, fitted and held out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.memory import GIB, peak_memory
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.costs.step_time import Efficiency, step_seconds
from expertmesh.costs.weight_formats import Weights
from expertmesh.planner.fit import fit_with
from expertmesh.planner.published import (
    PublishedMeasurement,
    published_models,
    published_points,
    published_serving,
)
from expertmesh.planner.serving import Serving


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
    def time_error(self) -> float:
        """Predicted over measured time, minus one, if the row is a rate; else `error`."""
        is_rate = self.point.unit in ("tokens_per_s", "tflops")
        return self.point.measured / self.predicted - 1 if is_rate else self.error


@dataclass(frozen=True)
class Summary:
    """Errors of several rows.

    Attributes:
        count: number of rows.
        median: median of absolute errors.
        within: share of rows within `limit`.
        limit: 40 % for time, 15 % for memory.
        low: the tenth percentile of measured over predicted time.
        high: the ninetieth percentile.
    """

    count: int
    median: float
    within: float
    limit: float
    low: float
    high: float

    @staticmethod
    def of(rows: Sequence[Judged], limit: float = 0.4) -> "Summary":
        """Summary of some rows, at least one."""
        errors = [abs(row.time_error) for row in rows]
        ratios = sorted(1 / (1 + row.time_error) for row in rows)
        last = len(ratios) - 1
        return Summary(
            count=len(rows),
            median=median(errors),
            within=sum(error <= limit for error in errors) / len(errors),
            limit=limit,
            low=ratios[round(0.1 * last)],
            high=ratios[round(0.9 * last)],
        )


@dataclass(frozen=True)
class Validation:
    """The fitted constants, and all rows with predictions.

    Attributes:
        efficiency: the fitted constants.
        throughput: rows of training throughput.
        memory: rows of peak memory; nothing is fitted on them.
        parts: rows of parts of a step; nothing is fitted on them.
        serving: rows of generation; nothing is fitted on them, and most have guessed batches.
    """

    efficiency: Efficiency
    throughput: tuple[Judged, ...]
    memory: tuple[Judged, ...]
    parts: tuple[Judged, ...]
    serving: tuple[Judged, ...]

    @property
    def fitted(self) -> tuple[Judged, ...]:
        """Rows of throughput on which the constants are fitted."""
        return tuple(row for row in self.throughput if row.point.is_fitted)

    @property
    def held_out(self) -> tuple[Judged, ...]:
        """Rows of throughput on which nothing is fitted."""
        return tuple(row for row in self.throughput if not row.point.is_fitted)


def validate(own: Sequence[PublishedMeasurement] = ()) -> Validation:
    """Fit the constants on the marked rows and the user's own, and predict all rows.

    Args:
        own: measurements beside the published ones, all for the fit.

    Example:
        >>> from benchmarks.planner.validation import Summary, validate
        >>> held_out = Summary.of(validate().held_out)
        >>> held_out.median < 0.2 and held_out.within > 0.8
        True
    """
    points = (*published_points(), *own)
    efficiency = fit_with(own)

    def judged(rows: Sequence[PublishedMeasurement]) -> tuple[Judged, ...]:
        return tuple(Judged(row, predicted(row, efficiency)) for row in rows)

    return Validation(
        efficiency,
        judged(points),
        judged(published_points("memory")),
        judged(published_points("parts")),
        judged_serving(),
    )


def judged_serving() -> tuple[Judged, ...]:
    """Rows of generation with predictions."""
    found = []
    for name, v in published_serving().items():
        way = serving_of(v)
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
        found.append(Judged(point, 1e3 * way.seconds.total_s))
    return tuple(found)


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
