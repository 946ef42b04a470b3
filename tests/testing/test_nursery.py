"""The process that ranks are forked from has one thread, whatever the test run has, and its children's ends are seen."""

import os
import signal
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from tests.support.nursery import Nursery, the_nursery

BEFORE = []


def num_threads_of_parent():
    return len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def returns(value):
    return value


def fails():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise ValueError("no")


def echoes(pipe):
    pipe.send((list(BEFORE), pipe.recv()))


def sleeps(pipe):
    pipe.send("ready")
    time.sleep(600)


def exitcode(child):
    child.join()
    return child.exitcode


def test_one_thread():
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert exitcode(the_nursery().start(num_threads_of_parent)) == 1
    finally:
        done.set()
        other.join()


def test_exit_codes():
    nursery = the_nursery()
    children = [nursery.start(returns, value) for value in (None, 0, 7)]
    assert [exitcode(child) for child in children] == [0, 0, 7]
    assert exitcode(nursery.start(fails)) == 1


def test_children_know_what_was_when_the_nursery_was_made():
    BEFORE.append("made later")
    here, there = Pipe()
    child = the_nursery().start(echoes, pipe=there)
    there.close()
    here.send("a word")
    assert here.recv() == ([], "a word")
    assert exitcode(child) == 0


def test_a_killed_child_closes_its_pipe():
    here, there = Pipe()
    child = the_nursery().start(sleeps, pipe=there)
    there.close()
    assert here.recv() == "ready" and child.exitcode is None
    child.kill()
    with pytest.raises(EOFError):
        here.recv()
    assert exitcode(child) == -signal.SIGKILL
    child.kill()  # nothing is left to kill


def test_a_module_that_is_not_there():
    with pytest.raises(ImportError, match="no_such_module"):
        the_nursery().import_modules("math", "no_such_module")


def test_children_end_with_the_nursery():
    here, there = Pipe()
    nursery = Nursery()
    child = nursery.start(sleeps, pipe=there)
    there.close()
    assert here.recv() == "ready"
    nursery.close()
    with pytest.raises(EOFError):
        here.recv()
    with pytest.raises(ChildProcessError):
        nursery.start(returns, 0)
    assert child.pid != os.getpid()
