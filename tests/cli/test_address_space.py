"""Too little address space is one line and an exit code, not a traceback, nor an end without a word."""

import subprocess
import sys

import pytest
from tests.support.patience import PATIENCE_S

PROGRAM = [sys.executable, "-m", "expertmesh"]
LIMITS = ["prlimit --as=300000000", "prlimit --as=700000000", "ulimit -v 800000;"]
VERBS = {
    "train": ["train", "gpt-moe-test"],
    "generate": ["generate", "runs/none", "a"],
    "serve": ["serve", "runs/none"],
    "doctor": ["doctor"],
}


def limited(limit, words, folder):
    command = f'{limit} exec "$@"' if limit.endswith(";") else f'exec {limit} "$@"'
    return subprocess.run(
        ["bash", "-c", command, "bash", *PROGRAM, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("verb", VERBS)
def test_it_is_said_in_one_line(tmp_path, limit, verb):
    done = limited(limit, VERBS[verb], tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "MB of address space, and PyTorch alone needs" in done.stderr, done.stderr
    assert "raise the limit" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["plan", "--help"]])
def test_what_loads_no_torch_answers(tmp_path, words):
    done = limited(LIMITS[0], words, tmp_path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout
