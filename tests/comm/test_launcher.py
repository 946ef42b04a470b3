"""Ranks whose torchrun was killed at once, which tells nobody, end by themselves."""

import os
import subprocess
import sys
import threading

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.comm import launcher

RANK = """
import os, signal, sys, threading
from expertmesh.comm.launcher import ended_with_launcher
def stop(number, frame):
    print(signal.Signals(number).name, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
with ended_with_launcher():
    print("works", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_rank_ends_when_its_launcher_is_killed(local_rank):
    parent = subprocess.Popen(
        ["/bin/sh", "-c", '"$0" -c "$1" & wait', sys.executable, RANK],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": local_rank},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout.readline() == "works\n"
    parent.kill()
    said, told = parent.communicate(timeout=PATIENCE_S)  # until the rank has closed them, too
    assert said == "SIGTERM\n"
    line = f"torchrun (process {parent.pid}) is gone: its ranks stop\n"
    assert told == (line if local_rank == "0" else ""), "once per host"


@pytest.mark.parametrize("ends", [True, False], ids=["in time", "never"])
def test_a_rank_that_does_not_end_is_ended(threshold, capfd, ends):
    over, done = threading.Event(), []

    def stop():
        done.append("stop")
        if ends:
            over.set()

    threshold(launcher, "_POLL_S", 0)
    threshold(launcher, "_GRACE_S", 0)
    launcher._watch(0, over, stop, lambda: done.append("end"))  # no parent has this number
    assert done == (["stop"] if ends else ["stop", "end"])
    told = capfd.readouterr().err
    assert "torchrun (process 0) is gone" in told
    assert ("is ended now" in told) == (not ends)


def test_without_torchrun_nobody_watches(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = threading.active_count()
    with launcher.ended_with_launcher():
        assert threading.active_count() == before
