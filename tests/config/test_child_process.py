"""Processes that answer one request at a time: interrupted, ended, forked, or unable to start."""

import subprocess
import sys

import pytest

from expertmesh.config.child_process import ChildEndedError, ChildProcess
from expertmesh.errors import ConfigError

MODULE = """
import os, pathlib, time
from expertmesh.config.child_process import answer_requests

def answer(asked):
    if asked == b"wait":
        pathlib.Path("begun").touch()
        time.sleep(600)
    if asked == b"leave":
        os._exit(7)
    return asked * 2

answer_requests(answer)
"""
INTERRUPTED = """
import os, pathlib, signal, threading, time
from expertmesh.config.child_process import ChildProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
child = ChildProcess("answering", "it")
assert child.ask(b"a") == b"aa"

def interrupt():
    while not pathlib.Path("begun").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    child.ask(b"wait")
except KeyboardInterrupt:
    assert child.ask(b"b") == b"bb", "the answer of the next request is its own"
    print("asked again")
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_request_that_was_interrupted_leaves_no_answer_for_the_next(place):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=place, capture_output=True, text=True, check=False)
    assert done.stdout == "asked again\n", done.stderr


def test_a_process_that_ends_says_how_and_is_started_again(place):
    child = ChildProcess("answering", "it")
    with pytest.raises(ChildEndedError) as ended:
        child.ask(b"leave")
    assert ended.value.returncode == 7
    assert child.ask(b"\0" * 99_999) == b"\0" * 199_998
    child.end()
    assert child.ask(b"") == b""
    child.end()


def test_one_that_cannot_start_is_said():
    with pytest.raises(ConfigError, match="the process of x cannot start .*no_such_module.*; leave"):
        ChildProcess("expertmesh.no_such_module", "the process of x").ask(b"")
