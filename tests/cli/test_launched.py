"""What a user of torchrun reads: each thing once, and torchrun's own report with the reason."""

import json
import os
import subprocess
import sys

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli import launched
from expertmesh.cli.main import VERBS, main
from expertmesh.errors import CollectiveError, ConfigError, PeerError

RANKS_BEGAN = 1_000_000


@pytest.fixture
def as_rank(monkeypatch, tmp_path):
    """Makes this process one that torchrun started; gives the file in which it looks for the reason of a failure."""

    def become(rank, local_rank):
        # as torchrun has it: a folder for each host's attempt, in it one for each rank
        file = tmp_path / f"host{rank // 2}" / str(local_rank) / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        for name, value in {
            "TORCHELASTIC_RUN_ID": "none",
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "TORCHELASTIC_ERROR_FILE": file,
        }.items():
            monkeypatch.setenv(name, str(value))
        return file

    return become


@pytest.mark.parametrize(
    "words",
    [
        ["train", "gpt-moe-tset"],
        ["train", "gpt-moe-test", "--no", "1"],
        ["bench", "com"],
        ["bench", "comm", "--largest-mib", "0"],
        ["doctor", "--fast"],
        ["generate", "--rum", "a"],
        ["generate", "--run", "none", "a"],
        ["translate", "--to", "de", "a"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_said_once_per_host(as_rank, capsys, words):
    for rank, local_rank in ((0, 0), (1, 1), (2, 0), (3, 1)):
        file = as_rank(rank, local_rank)
        os.utime(file.parent, (RANKS_BEGAN, RANKS_BEGAN))
        code = main(words)
        said = capsys.readouterr().err
        assert code == (1 if local_rank else 2)
        assert said.count("error:") == (not local_rank)
        assert file.exists() == (not local_rank)
        if not local_rank:
            told = json.loads(file.read_text())["message"]["extraInfo"]
            assert told["py_callstack"] == said.strip()
            assert int(told["timestamp"]) == RANKS_BEGAN, "older than any rank's end"


FAILURES = {
    "a mistake that all make": (None, "error: unknown verb"),
    "the leader failed": (PeerError("optim.lr=-1: must be (rank 0)"), "error: --optim.lr -1"),
    "a rank is lost": (CollectiveError("lost another rank"), "error: lost another rank"),
}


def _leaves(failure, monkeypatch, capsys):
    """What the second rank of a host says when it fails so, and how long it waited before it left, in polls."""
    polls = []
    clock = [0.0]
    monkeypatch.setattr(launched.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        launched.time, "sleep", lambda s: (polls.append(s), clock.__setitem__(0, clock[0] + s))
    )

    def fail(words):
        with launched.said_once():
            raise ConfigError("unknown verb") if failure is None else failure

    monkeypatch.setitem(VERBS, "train", (fail, ""))
    assert main(["train"]) == 1
    return capsys.readouterr().err, sum(polls)


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("has_files", [True, False], ids=["torchrun's files", "no files"])
def test_who_is_not_heard_is_spoken_for(as_rank, monkeypatch, capsys, kind, has_files):
    """The rank that should speak was killed, or sleeps: the other one says it, and only then leaves."""
    file = as_rank(1, 1)
    if not has_files:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    failure, expected = FAILURES[kind]
    said, waited = _leaves(failure, monkeypatch, capsys)
    assert said.count("error:") == 1 and said.startswith(expected)
    patience = launched._LINGER_S if "lost" in kind else launched._PATIENCE_S
    waits = has_files or "lost" not in kind
    assert waited >= patience if waits else waited == 0
    assert file.exists() == has_files


@pytest.mark.parametrize("kind", FAILURES)
def test_nobody_waits_for_who_has_spoken(as_rank, monkeypatch, capsys, kind):
    as_rank(0, 0)
    launched.tell_launcher("error: it was this", is_mistake=False)
    as_rank(1, 1)
    failure, _ = FAILURES[kind]
    said, waited = _leaves(failure, monkeypatch, capsys)
    assert waited == 0
    assert said.count("error:") == ("lost" in kind), "who has lost another says so all the same"


def test_ranks_that_all_follow_from_something_else_do_not_wait_for_one_another(
    as_rank, monkeypatch, capsys
):
    as_rank(0, 0)
    launched.tell_launcher("error: lost another rank", is_mistake=False, follows=True)
    as_rank(1, 1)
    said, waited = _leaves(CollectiveError("lost another rank"), monkeypatch, capsys)
    assert "lost another rank" in said and waited == 0
    said, waited = _leaves(PeerError("the disk is full (rank 2)"), monkeypatch, capsys)
    assert "the disk is full" in said and waited == 0, "nobody else on this host knows"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["report", "--help"], []])
def test_the_first_rank_answers(as_rank, capsys, words):
    as_rank(0, 0)
    assert main(words) == 0
    assert capsys.readouterr().out
    as_rank(2, 0)
    assert main(words) == 0
    assert not capsys.readouterr().out


def test_nobody_reads_the_help():
    command = f"{sys.executable} -m expertmesh --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_torchrun_ends_with_the_reason(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "expertmesh", "train", "gpt-moe-test", "--train.device", "cpu"]
    command += ["--parallel.ep-degree", "3", "--train.run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    said, _, report = done.stderr.partition("Root Cause")
    for part in (said, report):
        assert part.count("error: --parallel.ep-degree 3: must divide") == 1, done.stderr


TIDIES_UP = """
import atexit, sys
from expertmesh.cli.main import program
atexit.register(lambda: print("tidied up"))
sys.argv = ["expertmesh", *sys.argv[1:]]
program()
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["trian"], 2)], ids=str)
@pytest.mark.parametrize("launched", [False, True], ids=["alone", "rank"])
def test_a_rank_leaves_at_once(words, code, launched):
    rank = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    environment = {**os.environ, **(rank if launched else {})}
    command = [sys.executable, "-c", TIDIES_UP, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == code, done.stderr
    assert ("tidied up" in done.stdout) == (not launched)
    assert ("expertmesh" in done.stdout) == (not code)
    assert ("error: " in done.stderr) == bool(code)
