"""What a user of torchrun reads: each thing once, and torchrun's own report with the reason."""

import json
import os
import subprocess
import sys
import threading

import pytest
from tests.support.known_rows import known
from tests.support.patience import PATIENCE_S

from expertmesh.cli import torchrun
from expertmesh.cli.main import VERBS, main
from expertmesh.errors import CollectiveError, ConfigError, PeerError, text_of

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
        *known([["translate", "--to", "de", "a"]]),
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
    "the leader failed": (
        PeerError(f"{text_of(ConfigError('optim.lr', -1, 'must be'))} (rank 0)"),
        "error: --optim.lr -1: must be (rank 0)",
    ),
    "a rank is lost": (CollectiveError("lost another rank"), "error: lost another rank"),
}


FOREVER = 1e9
"""The patience of who must not need any."""


@pytest.fixture
def leave(threshold, monkeypatch, capsys):
    """A function: what a rank says that fails so, with so much patience for the others of its host."""

    def run(kind, patience_s):
        def fail(words):
            with torchrun.once_per_host():
                raise FAILURES[kind][0] or ConfigError("unknown verb")

        threshold(torchrun, "_PATIENCE_S", patience_s)
        threshold(torchrun, "_LINGER_S", patience_s)
        monkeypatch.setitem(VERBS, "train", (fail, ""))
        assert main(["train"]) == 1
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("has_files", [True, False], ids=["torchrun's files", "no files"])
def test_who_is_not_heard_is_spoken_for(as_rank, leave, monkeypatch, kind, has_files):
    """The rank that should speak was killed, or sleeps: the other one says it."""
    file = as_rank(1, 1)
    if not has_files:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    said = leave(kind, 0)
    assert said.count("error:") == 1 and said.startswith(FAILURES[kind][1])
    assert file.exists() == has_files


@pytest.mark.parametrize("kind", FAILURES)
def test_a_rank_waits_for_who_should_speak(as_rank, leave, kind):
    """It would be ended by torchrun when this one left."""
    first = as_rank(0, 0)
    as_rank(1, 1)
    spoken = []

    def speak():
        first.write_text(json.dumps({"message": {"message": "it was this"}}))
        spoken.append(True)

    timer = threading.Timer(0.1, speak)
    timer.start()
    said = leave(kind, FOREVER)
    assert spoken and said.count("error:") == ("lost" in kind), "who lost another says so at once"
    timer.join()


@pytest.mark.parametrize("kind", FAILURES)
def test_nobody_waits_for_who_has_spoken(as_rank, leave, kind):
    as_rank(0, 0)
    torchrun.report_to_elastic("error: it was this", is_mistake=False)
    as_rank(1, 1)
    assert leave(kind, FOREVER).count("error:") == ("lost" in kind)


def test_ranks_that_all_follow_from_something_else_do_not_wait_for_one_another(as_rank, leave):
    as_rank(0, 0)
    torchrun.report_to_elastic("error: lost another rank", is_mistake=False, follows=True)
    as_rank(1, 1)
    assert "lost another rank" in leave("a rank is lost", FOREVER)
    assert "must be (rank 0)" in leave("the leader failed", FOREVER), "it may be on another host"


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
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
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
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert done.returncode == code, done.stderr
    assert ("tidied up" in done.stdout) == (not launched)
    assert ("expertmesh" in done.stdout) == (not code)
    assert ("error: " in done.stderr) == bool(code)
