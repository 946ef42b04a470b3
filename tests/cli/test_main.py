"""The front door: help, exit codes, and one line for every failure that a user can meet."""

import errno
import os
import subprocess
import sys

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli import main as front
from expertmesh.cli.family_verbs import FAMILY_VERBS
from expertmesh.cli.prog_name import prog_name
from expertmesh.errors import CheckpointError, ConfigError, TrainingDivergedError


def failing_verb(error):
    def verb(argv):
        raise error

    return verb


def test_no_words_prints_help(capsys):
    assert front.main([]) == 0
    text = capsys.readouterr().out
    for verb in [*front.VERBS, *FAMILY_VERBS]:
        assert f"  {verb} " in text


def test_version(capsys):
    import expertmesh

    assert front.main(["--version"]) == 0
    assert capsys.readouterr().out == f"expertmesh {expertmesh.__version__}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("chat", "error: unknown verb 'chat'; did you mean generate MODEL --chat --interactive?\n"),
        ("trian", "error: unknown verb 'trian'; did you mean train?\n"),
        (
            "x",
            f"error: unknown verb 'x'; use one of {', '.join([*front.VERBS, *FAMILY_VERBS])}\n",
        ),
    ],
)
def test_unknown_verb(word, message, capsys):
    assert front.main([word]) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a=1: must be 2; set it"), 2, "a=1: must be 2; set it"),
        (CheckpointError("step_1: is damaged; use step_0"), 1, "step_1: is damaged; use step_0"),
        (TrainingDivergedError("3 bad steps;\n lower lr"), 1, "3 bad steps; lower lr"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x"),
            1,
            "No space left on device (runs/x); free some space or choose another folder",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/x"),
            1,
            "Permission denied (runs/x); choose a folder that you may write, or change its permissions",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ZeroDivisionError("x"),
            1,
            "unexpected ZeroDivisionError: x; run again with --debug for the traceback",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failures_are_one_line(error, code, message, monkeypatch, capsys):
    monkeypatch.setitem(front.VERBS, "doctor", (failing_verb(error), ""))
    assert front.main(["doctor"]) == code
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_verb_alone_says_what_it_needs(capsys):
    assert front.main(["generate"]) == 2
    needed = f'no run given; write one: {prog_name()} generate runs/gpt-moe-demo "def main("'
    assert f"{needed} (see {prog_name()} generate --help)\n" in capsys.readouterr().err


def test_debug_keeps_the_traceback(monkeypatch):
    monkeypatch.setitem(front.VERBS, "doctor", (failing_verb(ZeroDivisionError("x")), ""))
    with pytest.raises(ZeroDivisionError):
        front.main(["doctor", "--debug"])


def test_a_verb_gets_its_words_and_gives_its_code(monkeypatch):
    seen = []

    def verb(argv):
        seen.append(argv)
        return 7

    monkeypatch.setitem(front.VERBS, "doctor", (verb, ""))
    assert front.main(["doctor", "a", "--b"]) == 7
    assert seen == [["a", "--b"]]


def test_a_reader_that_leaves_early_is_no_error():
    """As in `expertmesh train gpt-moe-test --dry-run | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "expertmesh", "train", "gpt-moe-test", "--dry-run"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_folder_that_was_removed_is_said(tmp_path, monkeypatch, capsys):
    """MKL would end the process as torch is loaded."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert front.main(["runs", "."]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the current folder was removed; ") and error.count("\n") == 1
