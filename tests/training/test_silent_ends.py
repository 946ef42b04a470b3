"""Whoever cannot be told of a run, and what is lost of one: the run goes on where its own disk is good, and says so."""

import dataclasses
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console
from tests.training.test_stop import nobody, run_words  # noqa: F401

from expertmesh.cli.main import main
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.task import GPTTask
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_lines, read_metrics


class Failing(io.TextIOBase):
    """Takes so many writes, then fails; what is not flushed fails again."""

    def __init__(self, number, writes=0):
        self.number, self.writes = number, writes

    def write(self, text):
        self.writes -= 1
        if self.writes < 0:
            raise OSError(self.number, os.strerror(self.number))
        return len(text)

    def flush(self):
        pass

    def fileno(self):
        raise io.UnsupportedOperation

    encoding = "utf-8"


def steps_of(config):
    return [row["step"] for row in read_metrics(RunDir(config.train.run_dir).metrics)]


@pytest.mark.parametrize("writes", [0, 3])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF])
def test_a_run_goes_on_where_only_its_log_is_lost(tiny, number, writes, capfd):
    config = tiny()
    result = train(config, recipe="gpt-moe-test", console=Console(file=Failing(number, writes)))
    assert (result.step, result.stopped_by) == (8, None)
    assert steps_of(config) == list(range(1, 9))
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"warning: standard output cannot be written ({os.strerror(number)})")
    assert "the run goes on" in said and "metrics.jsonl" in said


def full_stdout(words):
    """The code of a call whose standard output lies on a full disk."""
    copy = os.open(os.devnull, os.O_WRONLY)
    full = Failing(errno.ENOSPC)
    full.fileno = lambda: copy
    try:
        with redirect_stdout(full):
            return main(words)
    finally:
        os.close(copy)


def test_the_end_of_a_run_is_said_elsewhere(tiny, capfd):
    assert full_stdout(run_words(tiny())) == 0
    said = capfd.readouterr().err
    assert "the run goes on without it" in said and "8 steps" in said and "checkpoint: " in said


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor", "--help"], ["train", "--help"]])
def test_other_verbs_say_that_they_could_not_answer(words, capfd):
    assert full_stdout(words) == 1
    assert capfd.readouterr().err.startswith("error: No space left on device (standard output); free")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_named_however_python_writes(unbuffered):
    """Unbuffered, `print` fails, and the next flush is fine."""
    call = [sys.executable, "-m", "expertmesh", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            call,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    (said,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert said.startswith("error: No space left on device (standard output); free")


def test_a_closed_standard_output_is_said(tiny, capfd):
    with redirect_stdout(None):
        assert main(run_words(tiny())) == 0
        sys.stdout.close()
    assert "standard output is closed; the run goes on" in capfd.readouterr().err


def test_standard_error_may_be_lost_too(tiny):
    config = tiny()
    with redirect_stderr(Failing(errno.ENOSPC)):
        assert full_stdout(run_words(config)) == 0
    assert steps_of(config) == list(range(1, 9))


def test_a_dead_pipe_stops_the_run_and_standard_error_hears_how_to_go_on(
    tiny,
    nobody,  # noqa: F811
    capfd,
):
    with redirect_stdout(nobody("dead pipe")):
        assert main(run_words(tiny())) == 128 + signal.SIGPIPE
    first, last = capfd.readouterr().err.splitlines()[-2:]
    assert first == "nobody reads standard output any more: stopping after this step, to save"
    assert "stopped by SIGPIPE after step" in last and "--train.resume auto" in last


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace('"step"', '"stop"'), *lines[2:]]))


def flip_a_loss(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace('"loss"', '"lozz"'), *lines[2:]]))


def behead(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[3:]))


SPOILED = {
    "metrics": [
        (lambda path: path.write_bytes(b""), "lacks 8 of 8 steps (1 to 8)"),
        (lambda path: path.unlink(), "lacks 8 of 8 steps (1 to 8)"),
        (lambda path: path.write_bytes(bytes(4000)), "lacks 8 of 8 steps (1 to 8)"),
        (cut, "to 8)"),
        (behead, "lacks 3 of 8 steps (1 to 3)"),
        (flip, "lacks 1 of 8 steps (2)"),
        (flip_a_loss, "lacks 1 of 8 steps (2)"),
    ],
    "experts": [
        (lambda path: path.write_bytes(b""), "experts.jsonl lacks rows"),
        (lambda path: path.unlink(), "experts.jsonl lacks rows"),
        (cut, "experts.jsonl lacks rows"),
        (behead, "experts.jsonl lacks rows"),
        (flip, "experts.jsonl lacks rows"),
    ],
}


@pytest.fixture(scope="module")
def finished(tiny_in, run_quietly, tmp_path_factory):
    config = tiny_in(tmp_path_factory.mktemp("finished"))
    run_quietly(config)
    return RunDir(config.train.run_dir).path


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [(name, *row) for name, rows in SPOILED.items() for row in rows] + [("metrics", None, "")],
)
def test_lost_rows_are_mentioned_where_a_run_goes_on(tiny, finished, name, spoil, words):
    config = tiny(**{"train.steps": 9, "train.resume": "auto"})
    folder = RunDir(config.train.run_dir)
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(finished, folder.path)
    if spoil is not None:
        spoil(getattr(folder, name))
    text = io.StringIO()
    train(config, recipe="gpt-moe-test", console=Console(file=text, width=1000))
    said = [line for line in text.getvalue().splitlines() if line.startswith("warning:")]
    assert len(said) == (spoil is not None)
    if spoil is not None:
        assert f"{name}.jsonl lacks" in said[0] and words in said[0] and "goes on" in said[0]


def watched(action):
    """The family of GPTs that calls a function in every batch of evaluations, and the list of the calls."""
    calls = []

    class Watched(GPTTask):
        def measure(self, *given):
            calls.append(len(calls) + 1)
            action(len(calls))
            return super().measure(*given)

    return dataclasses.replace(GPT, task=Watched), calls


BATCHES = 5


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("evaluation", "step"), [(0, 0), (1, 4), (2, 8)])
def test_a_signal_in_an_evaluation_leaves_it_out(tiny, number, evaluation, step):
    config = tiny(**{"train.eval_batches": BATCHES})
    last = evaluation * BATCHES + 2
    family, calls = watched(lambda call: call == last and os.kill(os.getpid(), number))
    text = io.StringIO()
    result = train(config, family=family, console=Console(file=text, width=1000))
    assert (result.step, result.stopped_by) == (step, number) and len(calls) == last
    assert result.checkpoint.name == f"step_{step:08d}"
    assert f"step {step}: the evaluation is left out" in text.getvalue()
    rows = read_lines(RunDir(config.train.run_dir).metrics)
    assert len(rows) == step and sum("eval_loss" in row for row in rows) == max(evaluation - 1, 0)
    again = train(config.updated({"train.resume": "auto"}), console=Console(quiet=True))
    assert (again.step, again.stopped_by) == (8, None)
