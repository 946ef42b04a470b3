"""Learning-rate sweep: a run for each of several rates, and the choice of the best."""

import json
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from expertmesh.config.base import dotted_values, expanded
from expertmesh.config.output_file import check_file, write_whole
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError, TrainingDivergedError, named
from expertmesh.models.family import Family, Metric
from expertmesh.models.registry import find_family
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_metrics
from expertmesh.training.state import differs

TABLE_NAME = "sweep.json"
_FREE = frozenset(
    {"family", "data.path", "data.dataset", "data.cache_dir", "data.tokenizer", "data.encode_with"}
    | {"train.run_dir", "train.resume", "train.device", "train.tensorboard", "train.eval_every"}
    | {"train.checkpoint_every", "train.keep_last", "train.keep_every"}
    | {"parallel.num_threads", "parallel.bind", "parallel.timeout_s"}
)
"""Options in which a run and its sweep may differ: paths, and options that do not affect weights."""


@dataclass(frozen=True)
class SweptRate:
    """Run of a sweep."""

    lr: float  # peak learning rate
    run_dir: str
    loss: float | None  # loss of the last evaluation; None: it diverged, or was stopped before its first evaluation
    metric: float | None  # the family's metric in that evaluation; None: as for `loss`
    steps: int = 0  # number of optimizer steps done, also in a run that diverged
    seconds: float = 0.0  # wall time of its steps
    stopped_by: str | None = None  # name of the signal that ended it early; None: it is finished


def sweep(
    config: RunConfig,  # configuration of all runs, except `optim.lr`, `train.run_dir` and `train.resume`
    rates: Sequence[float],  # peak learning rates
    *,
    recipe: str = "none",  # name of the recipe, kept with the runs
    family: Family | None = None,  # model family; None: the family in the configuration
    console: Console | None = None,  # output of progress; None: standard output
) -> list[SweptRate]:
    """Train at each of several learning rates, in folders lr-RATE of `config.train.run_dir`, and write sweep.json
    there.

    A second call continues: finished runs with the same options are read, an interrupted one is resumed. Use a seed
    that you do not report: choosing the best of several rates also selects for chance.

    Returns:
        The runs, in the order of the rates; after a signal, up to the run that it ended.
    """
    names = [f"lr-{float(rate)!r}" for rate in rates]
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "rates",
            ",".join(repr(float(rate)) for rate in rates),
            "must be at least one, each once",
            "write for example 1e-3,2e-3",
        )
    if config.train.resume == "required":
        raise ConfigError(
            "train.resume",
            "required",
            "a sweep resumes what is there and begins the rest",
            "leave it out",
        )
    family = find_family(config.family) if family is None else family
    folder = expanded(config.train.run_dir)
    runs = [
        config.updated({"optim.lr": rate, "train.run_dir": str(folder / name), "train.resume": "auto"})
        for rate, name in zip(rates, names, strict=True)
    ]
    for run in runs:
        _check_same_options(run, family)
        RunDir(run.train.run_dir).check_writable()
    check_file(folder / TABLE_NAME)
    found: list[SweptRate] = []
    for one in _each(runs, recipe, family, console):
        found.append(one)
        table = json.dumps([asdict(swept) for swept in found], indent=1)
        write_whole(folder / TABLE_NAME, f"{table}\n")
        if one.stopped_by is not None:
            break
    return found


def _check_same_options(config: RunConfig, family: Family) -> None:
    """Check that a run in a rate's folder has the same options: its result would otherwise be reported for these.

    The path of the data may differ: `train` compares their content.
    """
    run_dir = RunDir(config.train.run_dir)
    if not run_dir.config.exists():
        return
    before = run_dir.read_config(family)[0]
    old, new = (dotted_values(run.model_dump(mode="json")) for run in (before, config))
    for name, value in new.items():
        if name not in (*_FREE, *family.free) and differs(name, old.get(name), value):
            raise ConfigError(
                name,
                value,
                f"the run in {run_dir.path} has {old.get(name)}, and rates are compared with all else equal",
                f"use that value, or another {named('train.run_dir')}",
            )


def _each(runs: Sequence[RunConfig], recipe: str, family: Family, console: Console | None) -> Iterator[SweptRate]:
    for config in runs:
        lr, run_dir = config.optim.lr, config.train.run_dir
        try:
            result = train(config, recipe=recipe, family=family, console=console)
        except TrainingDivergedError:
            lines = read_metrics(RunDir(run_dir).metrics)
            seconds = _seconds(lines, family.items)
            yield SweptRate(lr, run_dir, None, None, lines[-1]["step"] if lines else 0, seconds)
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


def _seconds(lines: Sequence[Mapping[str, Any]], items: str) -> float:
    """Wall time of the steps in a metrics file, from items and items per second."""
    total, before = 0.0, 0
    for line in lines:
        done, rate = line[items], line[f"{items}_per_second"]
        # The first line of a branch includes the items of its trunk.
        total += (done - before if before else done / line["step"]) / rate
        before = done
    return round(total, 3)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def best_rate(runs: Sequence[SweptRate], metric: Metric) -> SweptRate | None:
    """Finished run with the best metric; None: no finished run."""
    ended = [run for run in runs if run.metric is not None and run.stopped_by is None]
    sign = -1.0 if metric.higher_is_better else 1.0
    return min(ended, key=lambda run: sign * (run.metric or 0.0), default=None)
