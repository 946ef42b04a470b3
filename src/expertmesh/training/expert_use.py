"""What each expert of each layer did in a step: the record behind a report's pictures.

About `RECORDS` steps of a run are recorded, evenly spread, so that a long run's file stays small.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expertmesh.training.metrics import read_lines

RECORDS = 200
"""A run has at least as many records, or one for each step if it is shorter, and at most twice as many."""


@dataclass(frozen=True)
class ExpertUse:
    """One step's use of the experts, one entry per MoE layer.

    Attributes:
        counts: rows chosen per expert, before dropping.
        dropped: rows dropped.
        confidence: mean routing weight of each expert's rows; 0 for an expert without a row.
        entropy: mean entropy of a token's routing weights over their sum, in nats; 0: one choice has all the weight.
    """

    counts: list[list[int]]
    dropped: list[int]
    confidence: list[list[float]]
    entropy: list[float]

    def named(self) -> dict[str, Any]:
        """As plain values by name."""
        return asdict(self)


def is_recorded(step: int, num_steps: int) -> bool:
    """Whether a step is recorded: every n-th one, and the last.

    Args:
        step: from 0.
        num_steps: of the run.
    """
    return step % max(num_steps // RECORDS, 1) == 0 or step == num_steps - 1


def use_of_experts(counts: list[list[int]], dropped: list[int], sums: Sequence[float]) -> ExpertUse:
    """The record of a step.

    Args:
        counts: rows chosen per expert, per layer.
        dropped: rows dropped, per layer.
        sums: `LoadCounter.weights` of all layers and ranks, one after the other.
    """
    confidence, entropy, place = [], [], 0
    sums = [value if math.isfinite(value) else 0.0 for value in sums]  # of a step that diverged
    for rows in counts:
        *weights, nats, num_tokens = sums[place : place + len(rows) + 2]
        place += len(rows) + 2
        pairs = zip(weights, rows, strict=True)
        confidence.append([round(w / n, 4) if n else 0.0 for w, n in pairs])
        entropy.append(round(nats / num_tokens, 4) if num_tokens else 0.0)
    return ExpertUse(counts, dropped, confidence, entropy)


def read_use(path: Path) -> list[dict[str, Any]]:
    """The records of a run, each with its "step"; [] of a run without experts, or from before there were records."""
    shapes = [(line, shape) for line in read_lines(path) if (shape := _shape(line)) is not None]
    return [line for line, shape in shapes if shape == shapes[-1][1]]


def _shape(line: dict[str, Any]) -> list[int] | None:
    """Experts of each layer; None of a line that is no whole record."""
    try:
        sizes = [len(counts) for counts in line["counts"]]
        numbers = [*line["dropped"], *line["entropy"]]
        for row in (*line["counts"], *line["confidence"]):
            numbers += row
        is_whole = (
            [len(row) for row in line["confidence"]] == sizes
            and len(line["dropped"]) == len(line["entropy"]) == len(sizes)
            and all(map(math.isfinite, numbers))
        )
    except (KeyError, TypeError):
        return None
    return sizes if is_whole else None
