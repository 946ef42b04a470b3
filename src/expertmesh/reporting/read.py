"""Data of a run as plain values for the page; the run may be finished, interrupted, diverged, dense or without a
checkpoint."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertmesh.config.base import parse_json
from expertmesh.models.registry import FAMILIES
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.expert_use import read_use
from expertmesh.training.metrics import read_metrics

MOST_POINTS = 1500
"""Largest number of drawn points, within a factor of two: in a longer run every n-th step is drawn, and every
evaluation."""
_CURVES = ("loss", "lr", "grad_norm", "load_imbalance", "dropped_fraction", "dead_experts")


def read_run(path: str | Path) -> dict[str, Any]:
    """Read a run as plain values for the page."""
    folder = RunDir(path)
    config, recipe = folder.read_values()
    lines = read_metrics(folder.metrics)
    name = config.get("family", "gpt")
    is_known = name in FAMILIES
    items = FAMILIES[name].items if is_known else "samples"
    metric = FAMILIES[name].metric.key if is_known else "loss"
    return {
        # undecodable bytes of a name are replaced, because a page is UTF-8
        "name": os.fsencode(folder.path.resolve().name).decode(errors="replace"),
        "recipe": recipe,
        "items": items,
        "metric": metric.replace("_", " "),
        "status": _status(lines, config),
        "curves": _curves(lines, items),
        "validation": _validation(lines, metric),
        "experts": _experts(read_use(folder.experts)),
        "config": flat(config),
        "versions": flat(_json(folder.versions)),
    }


def _status(lines: list[dict[str, Any]], config: Mapping[str, Any]) -> str:
    if not lines:
        return "no step was recorded"
    train, last = config.get("train"), lines[-1]
    wanted = train.get("steps", 0) if isinstance(train, Mapping) else 0
    wanted = wanted if isinstance(wanted, int) else 0
    done = f"{last['step']:,} of {wanted:,} steps"
    if last.get("loss") is None or last.get("grad_norm") is None:
        return f"diverged: the last step is not finite; {done}"
    return f"finished: {done}" if last["step"] >= wanted else f"not finished: {done}"


def _curves(lines: list[dict[str, Any]], items: str) -> dict[str, list[Any]]:
    stride = max(len(lines) // MOST_POINTS, 1)
    kept = [line for i, line in enumerate(lines) if (len(lines) - 1 - i) % stride == 0]
    found = {name: [line.get(name) for line in kept] for name in ("step", *_CURVES)}
    found["throughput"] = [line.get(f"{items}_per_second") for line in kept]
    return found


def _validation(lines: list[dict[str, Any]], metric: str) -> dict[str, list[Any]]:
    """Evaluations by step; the evaluation before training is step 0."""
    found: dict[str, list[Any]] = {"step": [], "loss": [], "metric": []}
    for line in lines:
        for prefix, step in (("initial_eval_", 0), ("eval_", line["step"])):
            if f"{prefix}loss" in line:
                found["step"].append(step)
                found["loss"].append(line[f"{prefix}loss"])
                found["metric"].append(line.get(f"{prefix}{metric}"))
    return found


def _experts(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Statistics of experts per record and layer, such as load relative to the mean; None for a dense model."""
    if not lines:
        return None
    last = lines[-1]
    layers = range(len(last["counts"]))
    rows = [[max(sum(line["counts"][i]), 1) for line in lines] for i in layers]
    sizes = [len(counts) for counts in last["counts"]]

    def over_mean(layer: int, expert: int) -> list[float]:
        counts = (line["counts"][layer][expert] for line in lines)
        return [round(c * sizes[layer] / n, 3) for c, n in zip(counts, rows[layer], strict=True)]

    dropped = [[line["dropped"][i] for line in lines] for i in layers]
    return {
        "step": [line["step"] for line in lines],
        "sizes": sizes,
        "load": [over_mean(i, e) for i in layers for e in range(sizes[i])],
        "dropped": [[round(d / n, 4) for d, n in zip(dropped[i], rows[i], strict=True)] for i in layers],
        "dead": [[line["counts"][i].count(0) for line in lines] for i in layers],
        "entropy": [[line["entropy"][i] for line in lines] for i in layers],
        "last": [
            {"layer": i, "expert": e, "confidence": last["confidence"][i][e], "rows": count}
            for i in layers
            for e, count in enumerate(last["counts"][i])
        ],
        "positions": _by_position(lines, len(sizes)),
        "labels": _by_label(lines[-max(len(lines) // 4, 1) :], sizes),
    }


def _by_position(lines: list[dict[str, Any]], num_layers: int) -> list[list[float]]:
    """Share of dropped rows at each part of a sample, per layer, averaged over records; [] if nothing was dropped."""
    found = [line["dropped_by_position"] for line in lines if line.get("dropped_by_position")]
    return [
        [round(sum(shares) / len(lines), 4) for shares in zip(*(f[i] for f in found), strict=True)]
        for i in range(num_layers if found else 0)
    ]


def _by_label(lines: list[dict[str, Any]], sizes: list[int]) -> dict[str, list[float]]:
    """Rows of each expert relative to the mean, layer after layer, for each kind of sample, over the last quarter of
    the records."""
    found: dict[str, list[float]] = {}
    for label in lines[-1].get("counts_by_label", {}):
        uses = [line.get("counts_by_label", {}) for line in lines]  # places may have moved meanwhile
        each = [use[label] for use in uses if label in use]
        for layer, size in enumerate(sizes):
            rows = [sum(use[layer][expert] for use in each) for expert in range(size)]
            found.setdefault(label, []).extend(round(n * size / max(sum(rows), 1), 3) for n in rows)
    return found


def flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested values to text by dotted names."""
    if not isinstance(values, Mapping):
        return {prefix: json.dumps(values) if not isinstance(values, str) else values}
    found: dict[str, str] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
