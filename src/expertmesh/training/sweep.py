"""One run for each of several learning rates, and which of them ends best."""

import json
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from expertmesh.config.base import expanded
from expertmesh.config.family import Family, Metric, find_family
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, TrainingDivergedError
from expertmesh.training.loop import train

TABLE_NAME = "sweep.json"


@dataclass(frozen=True)
class SweptRate:
    """One run of a sweep.

    Attributes:
        lr: its peak learning rate.
        run_dir: its folder.
        loss: of its last evaluation; None: it diverged.
        metric: the family's metric then; None: it diverged.
        steps: optimiser steps done.
        seconds: wall time of its steps.
        stopped_by: the name of the signal that ended it early; None: it is finished.
    """

    lr: float
    run_dir: str
    loss: float | None
    metric: float | None
    steps: int = 0
    seconds: float = 0.0
    stopped_by: str | None = None


def sweep(
    config: RunConfig,
    rates: Sequence[float],
    *,
    recipe: str = "none",
    family: Family | None = None,
    console: Console | None = None,
) -> list[SweptRate]:
    """Train at each of several rates, in folders lr-RATE of `config.train.run_dir`, and write sweep.json there.

    Started again it goes on: finished runs are read, a broken-off one is resumed. Choose a seed that is not reported:
    the best of several rates is a choice, and chance is part of it.

    Args:
        config: of all runs, but for `optim.lr`, `train.run_dir` and `train.resume`.
        rates: peak learning rates.
        recipe: name of the recipe, kept with the runs.
        family: what is trained; None: the family that the configuration names.
        console: where progress goes; None: standard output.

    Returns:
        The runs, in the order of the rates. After a signal the last of them is the one that it ended.

    Raises:
        ConfigError: there are no rates, a rate twice, or a run that `train` refuses.
    """
    names = [f"lr-{rate:g}" for rate in rates]
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"rates={','.join(f'{rate:g}' for rate in rates)}: must be at least one, each once; write for example 1e-3,2e-3"
        )
    family = find_family(config.family) if family is None else family
    folder = expanded(config.train.run_dir)
    runs = [
        config.updated(
            {"optim.lr": rate, "train.run_dir": str(folder / name), "train.resume": "auto"}
        )
        for rate, name in zip(rates, names, strict=True)
    ]
    found: list[SweptRate] = []
    for one in _each(runs, recipe, family, console):
        found.append(one)
        table = folder / TABLE_NAME
        partial = table.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(swept) for swept in found], indent=1) + "\n")
        partial.rename(table)
        if one.stopped_by is not None:
            break
    return found


def _each(
    runs: Sequence[RunConfig], recipe: str, family: Family, console: Console | None
) -> Iterator[SweptRate]:
    for config in runs:
        lr, run_dir = config.optim.lr, config.train.run_dir
        try:
            result = train(config, recipe=recipe, family=family, console=console)
        except TrainingDivergedError:
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            yield SweptRate(lr, run_dir, None, None)
            continue
        evaluation = result.evaluation or {}
        yield SweptRate(
            lr,
            run_dir,
            _finite(evaluation.get("loss")),
            _finite(evaluation.get(family.metric.key)),
            result.step,
            round(result.seconds, 3),
            None if result.stopped_by is None else signal.Signals(result.stopped_by).name,
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def best_rate(runs: Sequence[SweptRate], metric: Metric) -> SweptRate | None:
    """The finished run that ends best by a metric; None: there is none."""
    ended = [run for run in runs if run.metric is not None and run.stopped_by is None]
    sign = -1.0 if metric.higher_is_better else 1.0
    return min(ended, key=lambda run: sign * (run.metric or 0.0), default=None)
