"""Runs that end before their last step because their options say so, and gradient accumulation under its usual name."""

import io
import math
import re

import pytest
from rich.console import Console

from expertmesh.cli.report import curve_table
from expertmesh.config.run import TrainConfig
from expertmesh.errors import ConfigError
from expertmesh.models.registry import DEFAULT
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.ends import Ends
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_metrics


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_step_and_a_save_must_still_fit():
    clock = Clock()
    ends = Ends(TrainConfig(max_time=60), clock=clock)
    assert ends.waits_for_save and not ends.is_late()
    for seconds, late in ((10, False), (40, False), (41, True)):
        clock.now = 100 + seconds
        ends.stepped(10)  # of a save nothing is known: as long as a step
        assert ends.is_late() == late, seconds
    ends.saved(1)
    assert not ends.is_late() and not ends.waits_for_save
    ends.saved(30)
    assert ends.is_late()
    endless = Ends(TrainConfig(), clock=clock)
    endless.stepped(1e9)
    assert not endless.is_late() and not endless.waits_for_save


@pytest.mark.parametrize(
    ("losses", "is_over"),
    [
        ([], False),
        ([3, 2, 1], False),
        ([3, 2, 2], False),
        ([3, 2, 2, 2.5], True),
        ([3, 4, math.nan], True),
        ([3, 4, 2, 4], False),
        ([math.nan, math.nan], True),
    ],
)
def test_patience(losses, is_over):
    ends = Ends(TrainConfig(patience=2))
    ends.heard(losses)
    assert ends.has_no_patience() == is_over
    never = Ends(TrainConfig())
    never.heard(losses)
    assert not never.has_no_patience()


def rows_of(config):
    rows = read_metrics(RunDir(config.train.run_dir).metrics)
    return [{k: v for k, v in row.items() if not k.endswith("_per_second")} for row in rows]


def said_by(config):
    text = io.StringIO()
    result = train(config, recipe="gpt-moe-test", console=Console(file=text, width=1000))
    return result, text.getvalue()


def test_a_run_without_time_saves_and_goes_on_to_the_bit(tiny, run_quietly, tmp_path):
    straight = tiny(**{"train.run_dir": str(tmp_path / "straight")})
    run_quietly(straight)
    config = tiny(**{"train.max_time": 1e-9})
    result, said = said_by(config)
    assert (result.step, result.stopped_by, result.ended_early) == (0, None, "max_time")
    assert "1e-09 s of train.max_time are used up, saved in" in said and "train.resume=auto" in said
    assert result.checkpoint.name == "step_00000000"
    again = config.updated({"train.max_time": 1e9, "train.resume": "auto"})
    result, _ = said_by(again)
    assert (result.step, result.ended_early) == (8, None) and rows_of(again) == rows_of(straight)


def test_a_run_whose_evaluations_get_no_better_is_done(tiny):
    """Without a learning rate no evaluation is better than the first."""
    options = {"train.patience": 2, "train.eval_every": 2, "optim.lr": 1e-30}
    config = tiny(**options)
    result, said = said_by(config)
    assert (result.step, result.ended_early, result.stopped_by) == (4, "patience", None)
    assert "2 evaluations in a row had no validation loss below" in said
    assert result.checkpoint.name == "step_00000004"
    again, said = said_by(config.updated({"train.resume": "auto"}))
    assert (again.step, again.ended_early) == (4, "patience") and len(rows_of(config)) == 4
    more, _ = said_by(config.updated({"train.resume": "auto", "train.patience": 3}))
    assert (more.step, more.ended_early) == (6, "patience")


@pytest.mark.parametrize(("every", "steps"), [(None, 8), (1, 8), (3, 4), (100, 2)])
def test_lines_of_progress(tiny, every, steps):
    """The first step and the last one are always said."""
    _, said = said_by(tiny(**{"train.log_every": every}))
    assert len(re.findall(r"^step [0-9]+/8: ", said, re.MULTILINE)) == steps


DENSE = {"model.moe.num_experts": (), "model.moe.hidden_dim": 512}


@pytest.mark.parametrize("options", [DENSE, {}], ids=["dense", "experts"])
def test_experts_are_spoken_of_where_there_are_some(tiny, options):
    """In the lines of progress, in the rows, and in the table of a report."""
    config = tiny(**options)
    _, said = said_by(config)
    rows = rows_of(config)
    has_experts = not options
    assert ("expert load max/mean" in said) == ("dead experts" in said) == has_experts
    for name in ("load_imbalance", "dropped_fraction", "dead_experts"):
        assert (name in rows[-1]) == has_experts
    assert ("imbalance" in curve_table(rows, DEFAULT)) == has_experts


def test_gradient_accumulation_by_its_usual_name(tiny, run_quietly, tmp_path):
    runs = [
        tiny(**options, **{"train.run_dir": str(tmp_path / str(i))})
        for i, options in enumerate([{"train.micro_batch_size": 2}, {"train.gradient_accumulation_steps": 2}, {}])
    ]
    for run in runs:
        run_quietly(run)
    assert rows_of(runs[0]) == rows_of(runs[1]) != rows_of(runs[2])
    with pytest.raises(ConfigError, match="must divide train.batch_size, 4"):
        tiny(**{"train.gradient_accumulation_steps": 3})
    with pytest.raises(ConfigError, match="conflicts with train.micro_batch_size=2"):
        tiny(**{"train.gradient_accumulation_steps": 2, "train.micro_batch_size": 2})
