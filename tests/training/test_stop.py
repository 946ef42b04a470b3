"""How runs end early: signals, nobody who reads, steps that are not finite; what is said, and what is kept."""

import io
import os
import pty
import re
import signal
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.training.conftest import spoil_gradients

from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.cli.main import main
from expertmesh.models.gpt.family import GPT
from expertmesh.runs.run_dir import RunDir
from expertmesh.training import loop
from expertmesh.training.loop import train
from expertmesh.training.metrics import Load, StepMetrics
from expertmesh.training.progress import ProgressReport
from expertmesh.training.stop import StopRequest


@pytest.fixture
def nobody():
    """A function that opens a file whose reader is gone: "dead pipe" or "closed terminal" (writing gives EIO)."""
    opened = []

    def make(kind):
        reader, writer = os.pipe() if kind == "dead pipe" else pty.openpty()
        os.close(reader)
        opened.append(os.fdopen(writer, "w"))
        return opened[-1]

    yield make
    for file in opened:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), file.fileno())  # what is not written yet goes there
        file.close()


@pytest.mark.parametrize(
    "kind, is_terminal",
    [("dead pipe", False), ("closed terminal", True), ("closed terminal", False)],
)
def test_when_nobody_reads_the_run_saves_and_stops(tiny, nobody, kind, is_terminal):
    console = Console(file=nobody(kind), force_terminal=is_terminal)
    result = train(tiny(), recipe="gpt-moe-test", console=console)
    assert result.stopped_by == signal.SIGPIPE and result.step < 8
    # Stopped before the first step there is nothing to save but the beginning.
    assert result.checkpoint.name == f"step_{result.step:08d}"


def run_words(config, *more):
    words = ["--data.path", config.data.path, "--data.cache-dir", config.data.cache_dir]
    words += ["--train.run-dir", config.train.run_dir, "--train.no-tensorboard"]
    return ["train", "gpt-moe-test", "--train.steps", "8", "--train.device", "cpu", *words, *more]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGHUP, 129),
        (signal.SIGPIPE, 141),
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
    ],
)
def test_the_exit_code_names_the_signal(tiny, before_steps, nobody, monkeypatch, capfd, number, code):
    config, stack = tiny(), ExitStack()
    if number == signal.SIGPIPE:
        stack.enter_context(redirect_stdout(nobody("dead pipe")))
    else:
        before_steps(lambda model, step: step == 2 and os.kill(os.getpid(), number))
    with stack:
        assert main(run_words(config)) == code
    folder = RunDir(config.train.run_dir).checkpoints
    assert len(list_checkpoints(folder)) == 1
    out, errors = capfd.readouterr()
    assert "Traceback" not in errors and "error:" not in errors
    is_heard = number in (signal.SIGINT, signal.SIGTERM)  # else there is nobody to tell
    assert ("continue with --train.resume auto" in out) == is_heard
    if number == signal.SIGINT:
        assert "SIGINT: stopping after this step" in errors and "Ctrl-C again" in errors


@pytest.mark.parametrize(("changes", "number"), [({}, signal.SIGTERM), ({"train.max_time": 1e-9}, None)])
def test_a_caller_from_python_is_told_in_python(tiny, before_steps, changes, number):
    said = io.StringIO()
    before_steps(lambda model, step: step == 2 and number and os.kill(os.getpid(), number))
    loop.train(tiny(**changes), console=Console(file=said))
    assert "continue with train.resume=auto" in said.getvalue()
    assert "--" not in said.getvalue()


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def step_metrics(step):
    load = Load(12.3, 0.5, 128)
    return StepMetrics(step, 5.123, 0.1, 0.1, 12.3, 1e-3, 12345.0, load, 4, 100 * step)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_live_table_fits_the_terminal_and_says_that_it_stops(monkeypatch, columns):
    master, slave = pty.openpty()
    terminal = os.fdopen(slave, "w")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    with (
        redirect_stdout(terminal),
        ProgressReport(None, family=GPT, total_steps=1000, first_step=0) as report,
    ):
        report.evaluation(0, {"loss": 5.5, "bits_per_byte": 7.5})
        report.step(step_metrics(1))
        report.evaluation(1, {"loss": 5.5, "bits_per_byte": 6.25})
        report.asked(signal.SIGINT)
    print("the end", file=terminal, flush=True)
    shown = b""
    while b"the end" not in shown:  # a terminal hands over what was written piece by piece
        shown += os.read(master, 1 << 16)
    terminal.close()
    os.close(master)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = re.split(r"[\r\n]+", re.sub(r"step \d: validation loss [0-9.]+, [0-9.]+ bits per byte", "", plain))
    assert max(map(len, lines)) <= columns
    assert "SIGINT: stopping after this step" in plain and "12345" in plain.replace(",", "")
    assert "6.2500" in "".join(lines)  # in the table, too
    assert "bits/byte" in plain and "\N{HORIZONTAL ELLIPSIS}" not in plain


def test_the_rate_that_is_shown_is_items_over_time():
    """Not a mean of rates, in which slow steps hardly count."""
    console = Console(record=True, width=200)
    report = ProgressReport(console, family=GPT, total_steps=240, first_step=0)
    for step in range(1, 240):
        report.step(replace(step_metrics(step), items_per_second=900.0 if step % 2 else 10.0))
    shown = [int(rate) for rate in re.findall(r"tokens/s ([0-9]+)", console.export_text())]
    assert shown[0] == 900 and max(shown[20:]) < 2 * 2 / (1 / 900 + 1 / 10)


@pytest.mark.parametrize("steps, most", [("8", "10"), ("1", "10"), ("30", "10")])
def test_a_run_that_learned_nothing_is_a_failure(tiny, capfd, steps, most):
    words = run_words(tiny(), "--model.init-std", "1e38", "--train.max-bad-steps", most)
    words[words.index("--train.steps") + 1] = steps
    assert main(words) == 1
    said = capfd.readouterr()
    assert "non-finite loss or gradient" in said.err and "lower --optim.lr" in said.err
    assert "no checkpoint" in said.err and "expertmesh report" not in said.out


@pytest.mark.parametrize(
    "stopped, words",
    [
        (False, ["the last 2 steps were not finite and are not saved", "step_00000004"]),
        (True, ["stopped by SIGTERM after step 7", "the last 1 steps were not", "step_00000004"]),
    ],
)
def test_steps_that_are_not_in_the_checkpoint_are_said(tiny, before_steps, stopped, words):
    before_steps(spoil_gradients(lambda step: step >= 6))
    if stopped:
        before_steps(lambda model, step: step == 6 and os.kill(os.getpid(), signal.SIGTERM))
    text = io.StringIO()
    result = train(tiny(), recipe="gpt-moe-test", console=Console(file=text, width=1000))
    assert result.checkpoint.name == "step_00000004" and result.evaluated_at == 4 * (2 - stopped)
    assert all(word in text.getvalue() for word in words), text.getvalue()


def test_a_resumed_run_that_learns_nothing_more_is_a_failure(tiny, before_steps, run_quietly):
    run_quietly(tiny(**{"train.steps": 4}))
    before_steps(spoil_gradients(lambda step: True))
    with pytest.raises(loop.TrainingDivergedError, match=r"last 4 of 4 steps .*step_00000004"):
        run_quietly(tiny(**{"train.resume": "auto"}))
