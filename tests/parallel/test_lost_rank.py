"""A rank that is killed or stands still, in training or while a checkpoint is written: all others stop in time and say
why."""

import os
import random
import signal
import time

import pytest
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S

from expertmesh.checkpoints.store import list_checkpoints, newest_good
from expertmesh.cli.main import main
from expertmesh.training.metrics import read_metrics

NUM_RANKS = 4
TIMEOUT_S = 20.0
"""Longer than a busy machine lets a rank of a tiny model wait."""
STEPS = 10_000
TRAVEL = [
    *("--parallel.overlap-degree", "2", "--parallel.all-to-all", "hierarchical"),
    *("--parallel.ranks-per-node", "2", "--parallel.replicated-experts", "1"),
]
"""In training tokens are under way in every manner when the rank is lost."""


def words_of(folder, *more):
    return [
        *("train", "gpt-moe-test", "--model.dim", "16", "--train.steps", str(STEPS)),
        *("--data.max-bytes", "60000", "--data.cache-dir", str(folder / "cache")),
        *("--train.run-dir", str(folder / "run"), "--train.device", "cpu"),
        *("--train.checkpoint-every", "1", "--train.eval-every", "100000"),
        *("--train.eval-batches", "1", "--parallel.timeout-s", str(TIMEOUT_S), *more),
    ]


def command_line(words, odd=None, number=None):
    """The command line on this rank; rank `odd` gets a signal in the middle of its part of the third checkpoint."""
    from expertmesh.checkpoints import store as checkpoint

    write, calls = checkpoint.write_tensors, []

    def cut(partial, staged):
        calls.append(1)
        if len(calls) == 3:
            (partial / f"__{odd}_0.distcp").write_bytes(b"half")
            os.kill(os.getpid(), number)
        return write(partial, staged)

    if int(os.environ["RANK"]) == odd:
        checkpoint.write_tensors = cut
    return main(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("training", signal.SIGSTOP),
        ("saving", signal.SIGKILL),
        pytest.param("training", signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param("saving", signal.SIGSTOP, marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_stop(tmp_path, moment, number):
    draw = random.Random(f"{moment} {number}")
    odd = draw.randrange(NUM_RANKS)
    agent = Agent(NUM_RANKS, tmp_path)
    try:
        if moment == "saving":
            agent.start(command_line, words_of(tmp_path), odd, number)
        else:
            agent.start(command_line, words_of(tmp_path, *TRAVEL))
            wait_for_steps(tmp_path / "run" / "metrics.jsonl")
            time.sleep(draw.uniform(0.0, 0.5))
            agent.kill(odd, number)
        began = time.monotonic()
        codes = wait_without(agent, odd)
        assert time.monotonic() - began < PATIENCE_S
    finally:
        agent.stop()
    for rank in range(NUM_RANKS):
        if rank != odd:
            said = agent.printed(rank)
            assert codes[rank] == 1, (rank, codes, said)
            assert "Traceback" not in said
            lines = [line for line in said.splitlines() if line.startswith("error: ")]
            assert len(lines) <= 1 and (not lines or f"rank {rank}" in lines[0]), said
    assert any("error: " in agent.printed(rank) for rank in range(NUM_RANKS) if rank != odd)
    # What is visible is whole.
    folder = tmp_path / "run" / "checkpoints"
    assert newest_good(folder) == list_checkpoints(folder)[-1]
    assert moment != "saving" or newest_good(folder).name == "step_00000002"


def wait_for_steps(metrics):
    end = time.monotonic() + PATIENCE_S
    while not metrics.exists() or len(read_metrics(metrics)) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_without(agent, odd):
    """Exit codes when all but one rank have ended."""
    end = time.monotonic() + PATIENCE_S
    codes = []
    while time.monotonic() < end:
        codes = [process.exitcode for process in agent.ranks]
        if None not in codes[:odd] + codes[odd + 1 :]:
            break
        time.sleep(0.01)
    return codes
