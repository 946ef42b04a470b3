"""What a user of torchrun reads: each thing once, and torchrun's own report with the reason."""

import json
import os
import subprocess
import sys

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.cli import launched
from expertmesh.cli.main import main

RANKS_BEGAN = 1_000_000


@pytest.fixture
def as_rank(monkeypatch, threshold, tmp_path):
    """Makes this process one that torchrun started; gives the file in which it looks for the reason of a failure."""

    threshold(launched, "_PATIENCE_S", 0)  # torchrun would end the others meanwhile

    def become(rank, local_rank):
        for name, value in {
            "TORCHELASTIC_RUN_ID": "none",
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": 4,
            "TORCHELASTIC_ERROR_FILE": tmp_path / f"error-{rank}.json",
        }.items():
            monkeypatch.setenv(name, str(value))
        return tmp_path / f"error-{rank}.json"

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
