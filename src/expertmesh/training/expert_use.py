"""Use of each expert of each layer in a step, recorded in experts.jsonl for the pictures of a report.

About `RECORDS` steps of a run are recorded, evenly spread, so the file of a long run stays small.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from expertmesh.data.paths import distinct
from expertmesh.training.metrics import read_lines
from expertmesh.training.routing_losses import POSITIONS

RECORDS = 200
"""Least number of records of a run (or one per step, if it is shorter); it has at most twice as many."""


@dataclass(frozen=True)
class ExpertUse:
    """Use of the experts in a step, one entry per MoE layer.

    Attributes:
        dropped_by_position: share of the rows dropped in each of `POSITIONS` equal parts of a sample, from its first
            tokens to its last; empty if nothing was dropped.
    """

    counts: list[list[int]]  # rows chosen per expert, before dropping
    dropped: list[int]  # rows dropped
    confidence: list[list[float]]  # mean routing weight of each expert's rows; 0 for an expert without a row
    # mean entropy of a token's routing weights divided by their sum, in nats; 0: one choice has all the weight
    entropy: list[float]
    dropped_by_position: list[list[float]] = field(default_factory=list)
    # `counts` by the kind of sample (language, domain), if the family has kinds
    counts_by_label: dict[str, list[list[int]]] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        """Plain values by name, without empty ones."""
        return {name: value for name, value in asdict(self).items() if value}


def is_recorded(step: int, num_steps: int) -> bool:
    """Whether a step is recorded: every n-th step, and the last. `step`: from 0."""
    return step % max(num_steps // RECORDS, 1) == 0 or step == num_steps - 1


def use_of_experts(
    counts: list[list[int]],  # rows chosen per expert, per layer
    dropped: list[int],  # rows dropped, per layer
    sums: Sequence[float],  # `LoadCounter.watched` of all layers, summed over ranks and concatenated
    labels: Sequence[str] = (),  # names of the kinds of samples; duplicates get a number
) -> ExpertUse:
    """Record of a step."""
    labels = distinct(labels)
    left = iter([value if math.isfinite(value) else 0.0 for value in sums])  # a diverged run has non-finite sums

    def take(count: int) -> list[float]:
        return [next(left) for _ in range(count)]

    confidence, entropy, by_position = [], [], []
    by_label: dict[str, list[list[int]]] = {label: [] for label in labels}
    for rows in counts:
        pairs = zip(take(len(rows)), rows, strict=True)
        confidence.append([round(w / n, 4) if n else 0.0 for w, n in pairs])
        nats, num_tokens = take(2)
        entropy.append(round(nats / num_tokens, 4) if num_tokens else 0.0)
        places = [take(2) for _ in range(POSITIONS)]
        by_position.append([round(gone / n, 4) if n else 0.0 for gone, n in places])
        for label in labels:
            by_label[label].append([int(n) for n in take(len(rows))])
    if not any(map(any, by_position)):
        by_position = []
    return ExpertUse(counts, dropped, confidence, entropy, by_position, by_label)


def read_use(path: Path) -> list[dict[str, Any]]:
    """Records of a run, each with its "step"; [] for a run without experts or records."""
    shapes = [(line, shape) for line in read_lines(path) if (shape := _shape(line)) is not None]
    return [line for line, shape in shapes if shape == shapes[-1][1]]


def _shape(line: dict[str, Any]) -> list[int] | None:
    """Number of experts of each layer; None if the line is not a complete record."""
    try:
        sizes = [len(counts) for counts in line["counts"]]
        numbers = [*line["dropped"], *line["entropy"]]
        for row in (*line["counts"], *line["confidence"]):
            numbers += row
        for kind in line.get("counts_by_label", {}).values():
            if [len(row) for row in kind] != sizes:
                return None
        by_position = line.get("dropped_by_position", [[0.0] * POSITIONS] * len(sizes))
        numbers += [share for row in by_position for share in row]
        is_whole = (
            [len(row) for row in line["confidence"]] == sizes
            and [len(row) for row in by_position] == [POSITIONS] * len(sizes)
            and len(line["dropped"]) == len(line["entropy"]) == len(sizes)
            and all(map(math.isfinite, numbers))
        )
    except (KeyError, TypeError, AttributeError):
        return None
    return sizes if is_whole else None
