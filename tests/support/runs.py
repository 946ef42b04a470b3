"""Runs of tests: trained without a word, read back, compared line by line."""

import io
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from expertmesh.config.run import RunConfig
from expertmesh.models.task import Task
from expertmesh.training.loop import TrainResult, train
from expertmesh.training.metrics import read_metrics
from tests.oracle.numerics import relative_error

RELATIVE = 1e-9
"""Between FP64 runs whose sums are taken in another order."""


def train_quietly(config: RunConfig, **options: Any) -> TrainResult:
    """Train; what it prints goes nowhere."""
    return train(config, console=Console(file=io.StringIO()), **options)


def lines_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without the speeds, which no two runs have in common."""
    lines = read_metrics(Path(run_dir) / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.endswith("_per_second")} for line in lines]


def losses_of(config: RunConfig) -> list[float]:
    """The loss of each step of a run."""
    return [line["loss"] for line in lines_of(config.train.run_dir)]


def assert_same_lines(found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], *names: str) -> None:
    """The same steps, and in each the same values of these names, or none in both."""
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, oracle in zip(found, expected, strict=True):
        for name in names:
            assert (name in line) == (name in oracle), (line["step"], name)
            if name in oracle:
                error = relative_error(line[name], oracle[name])
                assert error <= RELATIVE, f"step {line['step']}: {name} is off by {error:.1e}"


def assert_resumed_to_the_bit(run_of: Callable[..., RunConfig], straight: str | Path, folder: Path) -> None:
    """A run that is stopped after 7 steps of 20 and goes on has the lines of one that did not stop."""
    for steps in (7, 20):
        train_quietly(run_of(folder, **{"train.steps": steps, "optim.schedule_steps": 20}))
    found, expected = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in lines_of(run)] for run in (folder, straight)
    )
    assert found == expected


def mortal(task: Any, *, step: int) -> type[Task]:
    """A family's task that kills its process in the first life, in a step."""

    class Mortal(task):
        def loss(self, model, batch, part):
            if part.step == step and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().loss(model, batch, part)

    return Mortal
