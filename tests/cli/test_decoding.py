"""Models for verbs that generate text: the file of their answers, and the ranks that share them."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
from tests.support.full_screen import full_log
from tests.support.patience import PATIENCE_S

from expertmesh.cli.decoding import kept
from expertmesh.cli.main import main

# The second signal comes while the first one's exit is under way.
ENDED = """
import os, signal, sys
from pathlib import Path
from expertmesh.cli.decoding import kept

with kept(Path("answers"), total=3, unit="texts") as file:
    file.write("one\\n")
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def handled():
    """A function that gives a signal a handler that ends nothing, or another one, until the test ends."""
    with ExitStack() as stack:

        def handle(number, handler=lambda *_: None):
            stack.callback(signal.signal, number, signal.signal(number, handler))
            return handler

        yield handle


def test_answers_outlive_sigterm(tmp_path):
    (tmp_path / "answers").write_text("precious")
    words = [sys.executable, "-c", ENDED]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    part = tmp_path / "answers.part"
    assert done.returncode == 143
    assert done.stderr == f"note: the first 1 of 3 texts are in {part}\n"
    assert part.read_text() == "one\n" and (tmp_path / "answers").read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "answers", part]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_handlers_are_as_before_after_the_answers(number, handled, tmp_path, capsys):
    before = handled(number)
    with kept(tmp_path / "a", total=1, unit="texts") as file:
        assert signal.getsignal(number) != before
        file.write("one\n")
    assert signal.getsignal(number) == before
    with pytest.raises(SystemExit) as left, kept(tmp_path / "b", total=1, unit="texts") as file:
        file.write("one\n")
        signal.raise_signal(number)
    assert left.value.code == 128 + number and signal.getsignal(number) == before
    assert capsys.readouterr().err == f"note: the first 1 of 1 texts are in {tmp_path / 'b.part'}\n"


def test_an_ignored_sighup_stays_ignored(handled, tmp_path):
    handled(signal.SIGHUP, signal.SIG_IGN)
    with kept(tmp_path / "a", total=1, unit="texts") as file:
        signal.raise_signal(signal.SIGHUP)
        file.write("one\n")
    assert (tmp_path / "a").read_text() == "one\n"


def test_a_note_that_cannot_be_written_hides_no_error(tmp_path):
    with (
        full_log(),
        pytest.raises(RuntimeError, match="mine"),
        kept(tmp_path / "a", total=2, unit="texts") as file,
    ):
        file.write("one\n")
        raise RuntimeError("mine")


# What writes the last files of each verb, whose call comes with the signal.
WRITERS = {
    "write_rest": ["convert", "--from", "run", "--to", "new"],
    "_write_rest": ["quantize", "run", "--to", "new", "--format", "int8"],
    "write_file": ["export", "run", "--output", "new"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_signal_leaves_no_partial_folder(name, place, handled, monkeypatch):
    def end(frame, event, _):
        if event == "call" and frame.f_code.co_name == name:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    handled(signal.SIGTERM)
    monkeypatch.chdir(place.folder)
    place.with_run()
    before = sorted(place.folder.iterdir())
    sys.setprofile(end)
    try:
        assert main(WRITERS[name]) == 143
    finally:
        sys.setprofile(None)
    assert sorted(place.folder.iterdir()) == before


@pytest.mark.parametrize("name", WRITERS)
def test_partial_folders_of_dead_processes_are_removed(name, place, monkeypatch):
    monkeypatch.chdir(place.folder)
    place.with_run()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (ended.pid, os.getpid(), os.getppid()):
        (place.folder / f".new.partial-{pid}").mkdir()
    (place.folder / ".other.partial-0000").mkdir()
    assert main(WRITERS[name]) == 0
    left = [path.name for path in place.folder.glob(".*partial*")]
    assert sorted(left) == sorted([f".new.partial-{os.getppid()}", ".other.partial-0000"])


def test_answers_are_written_outside_the_main_thread_too(tmp_path):
    def write():
        with kept(tmp_path / "a", total=1, unit="texts") as file:
            file.write("one\n")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "a").read_text() == "one\n"
