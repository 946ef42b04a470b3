"""Metrics of each step, and the metrics.jsonl file that they are written to."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expertmesh.config.base import parse_json
from expertmesh.config.output_file import naming


@dataclass(frozen=True)
class Load:
    """Balance of the experts in a step."""

    load_imbalance: float  # rows of the fullest expert over the mean, averaged over the MoE layers; 1.0 is perfect
    dropped_fraction: float  # share of the (token, choice) rows that were dropped
    dead_experts: int  # number of experts, over all layers, that no token chose


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step: a line of metrics.jsonl."""

    step: int  # number of optimizer steps done, including this one
    loss: float  # mean over the items of the batch, before the update
    aux_loss: float  # weighted balance loss
    z_loss: float  # weighted router z-loss
    grad_norm: float  # global gradient norm before clipping
    lr: float
    items_per_second: float  # items (tokens, or the family's unit) of the batch over the wall time of the step
    load: Load | None  # load of the experts; None for a dense model, whose lines leave it out
    skipped_steps: int  # steps so far whose update was skipped because the loss or a gradient was not finite
    items: int  # items trained on so far

    def named(self, items: str) -> dict[str, float]:
        """Metrics by name, with the name of the items as in "tokens" and "tokens_per_second"."""
        names = {"items": items, "items_per_second": f"{items}_per_second"}
        values = asdict(self)
        values |= values.pop("load") or {}
        return {names.get(key, key): value for key, value in values.items()}


def measure_load(counts: list[list[int]], num_dropped: int) -> Load | None:
    """Summarise routing; None for a dense model."""
    if not counts:
        return None
    used = [layer for layer in counts if sum(layer)]
    if not used:
        return Load(1.0, 0.0, sum(len(layer) for layer in counts))
    ratios = [max(layer) * len(layer) / sum(layer) for layer in used]
    return Load(
        load_imbalance=sum(ratios) / len(ratios),
        dropped_fraction=num_dropped / sum(sum(layer) for layer in used),
        dead_experts=sum(count == 0 for layer in counts for count in layer),
    )


class MetricsFile:
    """metrics.jsonl: one JSON object per step, appended and flushed at once.

    Args:
        last_step: lines of later steps, and damaged or truncated lines, are removed.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self.path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if (found := _record(line)) is not None and found["step"] <= last_step]
        if len(kept) < len(lines):
            partial = path.with_suffix(".partial")
            partial.write_bytes(b"".join(kept))
            partial.rename(path)
        self._file = path.open("ab")

    def write(self, values: dict[str, float]) -> None:
        """Append one line: the metrics of a step, and evaluations if there are any.

        JSON has no NaN and no infinity; a number that is not finite is written as null.
        """
        self.append({k: value if math.isfinite(value) else None for k, value in values.items()})

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line of plain values, which include "step" and no NaN or infinity."""
        with naming(self.path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with naming(self.path):
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file of records, in order; [] if the file does not exist."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [found for line in lines if (found := _record(line)) is not None]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a metrics file, in order: lines with a loss, whose values are numbers or null."""
    return [line for line in read_lines(path) if "loss" in line and all(map(_fits, line.values()))]


def _fits(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def evaluations(lines: list[dict[str, Any]], prefix: str = "eval_") -> list[dict[str, float]]:
    """Evaluations among the lines of a metrics file, in order; an evaluation before the first step has the prefix
    "initial_eval_".

    Null, which stands for a non-finite number in the file, is read as NaN.
    """
    found = (
        {
            key.removeprefix(prefix): math.nan if value is None else value
            for key, value in line.items()
            if key.startswith(prefix)
        }
        for line in lines
    )
    return [evaluation for evaluation in found if evaluation]


def _record(line: bytes) -> dict[str, Any] | None:
    """Values of a complete line with a step; None for any other line."""
    if not line.endswith(b"\n"):
        return None
    try:
        found: dict[str, Any] = parse_json(line)
        return found if isinstance(found["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None
