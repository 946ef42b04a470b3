"""Ranks of tests without work take no time of a processor, and answer again."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.patience import PATIENCE_S
from tests.support.ranks import RankError, RankPool


def sum_of(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return os.getpid(), total


def test_a_rank_whose_owner_has_gone_ends_in_silence(tmp_path):
    lines = """
        import sys, threading
        from multiprocessing import Pipe
        from tests.support.ranks import _serve

        here, there = Pipe()
        here.send("wake up")
        here.send((len, ((),), {}))

        def leave():
            here.recv()  # "awake"
            here.poll(None)
            here.close()  # what is not read makes the rank's next read a reset connection

        threading.Thread(target=leave).start()
        _serve(there, 0, 1, sys.argv[1], 60, sys.path)
    """
    words = [sys.executable, "-c", textwrap.dedent(lines), str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


class SlowToTake:
    """A result whose reader needs longer than ranks need to come to rest."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return _taken_slowly, (_Slow(), self.tensor)


class _Slow:
    def __reduce__(self):
        return time.sleep, (2.5,)


def _taken_slowly(_, tensor):
    return tensor


def slow_sum_of(tensor):
    return SlowToTake(sum_of(tensor)[1])


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid, state):
    end = time.monotonic() + PATIENCE_S
    while state_of(pid) != state:
        assert time.monotonic() < end, state_of(pid)
        time.sleep(0.05)


def test_ranks_rest_when_their_results_are_taken():
    pool = RankPool(2)
    try:
        for total in pool.run(slow_sum_of, torch.ones(3)):
            assert total.tolist() == [2.0, 2.0, 2.0]
    finally:
        pool.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
def test_ranks_without_work_are_stopped_and_go_on():
    pool = RankPool(2)
    try:
        # more than a pipe holds, so that a call cannot be sent to a rank at rest
        given = torch.ones(1 << 17)
        pids = [pid for pid, _ in pool.run(sum_of, given)]
        for _ in range(2):
            for pid in pids:
                wait_for_state(pid, "T")
            answers = pool.run(sum_of, given)
            assert [pid for pid, _ in answers] == pids
            assert all(torch.equal(total, 2 * given) for _, total in answers)
        os.kill(pids[1], signal.SIGKILL)
        wait_for_state(pids[1], "Z")
        with pytest.raises(RankError, match="rank . of 2:\nthe process died"):
            pool.run(sum_of, given)
        assert len(pool.run(sum_of, given)) == 2  # on new ranks
    finally:
        pool.stop()
