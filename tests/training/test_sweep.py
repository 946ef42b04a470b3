"""A sweep of learning rates: a run each, a table, the best; what is finished is not trained again."""

import json
import math
import signal

import pytest
from rich.console import Console
from tests.support.calls import calls_of

from expertmesh.cli.main import main
from expertmesh.cli.sweep import table
from expertmesh.errors import ConfigError
from expertmesh.models.family import Metric
from expertmesh.models.gpt.family import GPT
from expertmesh.runs.run_dir import RunDir
from expertmesh.training import sweep as sweeping
from expertmesh.training.metrics import read_metrics
from expertmesh.training.step import training_step


def test_each_rate_is_trained_once_and_the_best_is_named(corpus_folder, cache_folder, tmp_path, capsys):
    file = tmp_path / "sweep" / sweeping.TABLE_NAME
    places = ["--data.path", str(corpus_folder), "--data.cache-dir", str(cache_folder)]
    lengths = ["--train.steps", "4", "--train.eval-batches", "1", "--train.dtype", "float32"]
    words = [*places, *lengths, "--train.no-tensorboard", "--train.run-dir", str(file.parent)]
    with calls_of(training_step) as calls:
        assert main(["sweep", "gpt-moe-test", "--rates", "1e-6,1e-2", *words]) == 0
    assert len(calls) == 8
    said, rows = capsys.readouterr().out, json.loads(file.read_text())
    assert [row["lr"] for row in rows] == [1e-6, 1e-2] and rows[1]["loss"] < rows[0]["loss"]
    assert all(row["steps"] == 4 and f"{row['loss']:.4f}" in said for row in rows)
    assert said.rstrip().endswith("best: --optim.lr 0.01")
    with calls_of(training_step) as calls:  # one more rate
        assert main(["sweep", "gpt-moe-test", "--rates", "1e-6,1e-2,0.010000001", *words]) == 0
    assert len(calls) == 4
    again = json.loads(file.read_text())
    assert again[:2] == rows and [row["lr"] for row in again] == [1e-6, 1e-2, 0.010000001]
    assert len({row["run_dir"] for row in again}) == 3
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-4:-1]] == [
        *("1e-06", "0.01", "0.010000001")
    ]
    config = file.parent / "lr-0.01" / "config.json"
    before = config.read_bytes()
    capsys.readouterr()
    assert main(["sweep", "gpt-moe-test", "--rates", "1e-2", *words, "--optim.weight-decay", "9"]) == 2
    said = capsys.readouterr().err
    assert "--optim.weight-decay 9.0: the run in" in said and "lr-0.01 has 0.1, and" in said
    assert config.read_bytes() == before and json.loads(file.read_text()) == again
    with calls_of(training_step) as calls:  # what moves no weight may change
        assert main(["sweep", "gpt-moe-test", "--rates", "1e-2", *words, "--train.eval-every", "3"]) == 0
    assert not calls


def test_a_sweep_begins_with_the_weights_of_another_run(tiny, run_quietly, tmp_path, capsys):
    config = tiny(**{"train.steps": 1, "optim.warmup_steps": 1, "model.dim": 24})
    run_quietly(config)
    words = ["--data.cache-dir", config.data.cache_dir, "--data.path", config.data.path]
    words += ["--data.seq-len", "16", "--train.steps", "1", "--train.eval-batches", "1"]
    words += ["--train.dtype", "float32", "--train.no-tensorboard"]
    words += ["--train.init-from", config.train.run_dir, "--train.run-dir", str(tmp_path / "sweep")]
    assert main(["sweep", "gpt-moe-test", "--rates", "1e-3", *words]) == 0
    tuned = RunDir(tmp_path / "sweep" / "lr-0.001").read_config()[0]
    assert tuned.model == config.model and "best: --optim.lr 0.001" in capsys.readouterr().out


def test_a_rate_in_a_file_is_said_to_be_left_aside(tmp_path, capsys):
    file, said = tmp_path / "run.yaml", []
    for text in ("optim: {lr: 0.5}", "optim: {beta1: 0.8}"):
        file.write_text(f"{text}\ntrain: {{resume: required, run_dir: {tmp_path / 'sweep'}}}\n")
        assert main(["sweep", "gpt-moe-test", "--rates", "1", "--config", str(file)]) == 2
        said.append(capsys.readouterr().err)
    note = "note: --optim.lr 0.5 of --config is ignored: --rates sets the learning rates\n"
    assert said[0] == note + said[1] and said[1].startswith("error: --train.resume required")


def test_a_rate_that_diverges_or_is_stopped(tiny, before_steps):
    def act(model, step):
        if rates[0] == 1.0 and step == 1:
            next(model.parameters()).data.fill_(math.nan)
        elif rates[0] != 1.0 and step == 1:
            signal.raise_signal(signal.SIGTERM)

    before_steps(act)
    config = tiny(**{"train.steps": 3, "train.max_bad_steps": 1})
    for rates, stopped_by, said in (([1.0], None, "diverged"), ([0.5, 0.25], "SIGTERM", "-")):
        found = sweeping.sweep(config, rates, console=Console(quiet=True))
        assert [(one.stopped_by, one.steps) for one in found] == [(stopped_by, 2)]
        lines = read_metrics(RunDir(found[0].run_dir).metrics)
        took = sum(64 / line["tokens_per_second"] for line in lines)
        assert math.isclose(found[0].seconds, took, abs_tol=2**-10)
        assert sweeping.best_rate(found, GPT.metric) is None
        assert table(found, GPT).splitlines()[1].split()[1:3] == [said, said]


def test_the_best_is_the_largest_of_a_metric_that_should_be_large():
    runs = [sweeping.SweptRate(lr, "", 1.0, metric) for lr, metric in ((1, 0.5), (2, 0.9), (3, None))]
    for larger, best in ((False, 1), (True, 2)):
        assert sweeping.best_rate(runs, Metric(higher_is_better=larger)).lr == best


@pytest.mark.parametrize(
    ("rates", "text"),
    [([], "rates=: must be at least one"), ([0.5, 0.5], "rates=0.5,0.5: must be .* each once")],
)
def test_what_is_no_sweep(tiny, rates, text):
    with pytest.raises(ConfigError, match=text):
        sweeping.sweep(tiny(), rates)


def test_a_sweep_always_goes_on(tiny):
    with pytest.raises(ConfigError, match="train.resume=required: a sweep resumes what is there"):
        sweeping.sweep(tiny(**{"train.resume": "required"}), [0.5])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["gpt-moe-test"], "--rates: must be given; write --rates RATE"),
        (["gpt-moe-test", "--rates", "1e-3,fast"], "--rates fast: must be a finite number"),
        (["gpt-moe-test", "--rates", "-1"], "optim.lr"),
        (["gpt-moe-test", "--rates", "1e-3", "--dry-run"], "--dry-run: is for one run"),
        (["gpt-moe-test", "--rates", "1", "--optim.lr=2"], "--optim.lr: has no effect in a"),
        (
            ["gpt-moe-test", "--rates", "1", "--train.resume", "required"],
            "--train.resume: a sweep always goes on",
        ),
        (["nothing", "--rates", "1e-3"], "nothing"),
    ],
)
def test_mistakes_are_one_line(argv, text, capsys):
    assert main(["sweep", *argv]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    ["--rates 1e-3,2e-3", "--rates 1e-3 2e-3", "--rates 1e-3 --rates=2e-3", "--rates 1e-3, 2e-3"],
)
def test_rates_are_a_list(words, capsys):
    """What is asked for behind them is refused, so that nothing is trained."""
    for order in (f"sweep {words} gpt-moe-test --dry-run", f"sweep gpt-moe-test {words} --dry-run"):
        assert main(order.split()) == 2
        assert "--dry-run: is for one run" in capsys.readouterr().err
    for wrong in (f"sweep gpt-moe-test {words} high", f"sweep gpt-moe-test {words} --rates high"):
        assert main(wrong.split()) == 2
        assert "high" in capsys.readouterr().err
