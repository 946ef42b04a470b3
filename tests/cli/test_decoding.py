"""Models for verbs that generate text: the file of their answers, and the ranks that share them."""

import signal
import subprocess
import sys
import threading

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli.decoding import kept

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


def test_answers_outlive_sigterm(tmp_path):
    (tmp_path / "answers").write_text("precious")
    words = [sys.executable, "-c", ENDED]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    part = tmp_path / "answers.part"
    assert done.returncode == 143
    assert done.stderr == f"note: the first 1 of 3 texts are in {part}\n"
    assert part.read_text() == "one\n" and (tmp_path / "answers").read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [tmp_path / "answers", part]


def test_handlers_are_as_before_after_the_answers(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    with kept(tmp_path / "a", total=1, unit="texts") as file:
        assert signal.getsignal(signal.SIGTERM) != before
        file.write("one\n")
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(SystemExit) as left, kept(tmp_path / "b", total=1, unit="texts") as file:
        file.write("one\n")
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143 and signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().err == f"note: the first 1 of 1 texts are in {tmp_path / 'b.part'}\n"


def test_answers_are_written_outside_the_main_thread_too(tmp_path):
    def write():
        with kept(tmp_path / "a", total=1, unit="texts") as file:
            file.write("one\n")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "a").read_text() == "one\n"
