"""`kill -9` of one of four ranks under `torchrun --max-restarts`: the run goes on as if nothing had happened.

This file is also the program that torchrun starts.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S
from tests.support.runs import assert_same_lines, lines_of, train_quietly

from expertmesh.cli.torchrun import leave
from expertmesh.comm.start import start_group
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.recipes import RECIPES

NUM_RANKS = 4

BASE = {
    "model.dim": 16,
    "model.max_seq_len": 16,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "model.moe.router_noise": "gumbel",
    "data.seq_len": 16,
    "data.max_bytes": 60_000,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_every": 1000,
    "train.eval_batches": 1,
    "train.keep_last": 2,
    "train.tensorboard": False,
    "train.resume": "auto",
}
# No life gets further than this before it is killed, so that a fast machine cannot finish before the last of them.
STEPS_PER_LIFE = 4


def meet():
    """The first life fails; in the second one rank comes late, when the other has long read all that is in the
    store."""
    life, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    if life and rank == 0:
        time.sleep(1.0)
    start_group("gloo", timeout_s=PATIENCE_S)
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return 0 if life and total == 1 else 3


def test_a_rank_never_reads_where_dead_ones_listened(tmp_path):
    agent = Agent(2, tmp_path)
    codes = agent.run(meet, restarts=1, timeout_s=PATIENCE_S)
    assert codes == [0, 0], [agent.printed(rank)[-2000:] for rank in range(2)]
    assert agent.num_lives == 2


@pytest.mark.slow
def test_a_killed_rank(tmp_path):
    """The agent is ours, which needs no imports, and like torchrun's keeps its store from life to life."""
    agent, kills = Agent(NUM_RANKS, tmp_path), 1
    prepare(tmp_path, kills)
    codes = agent.run(main, *arguments(tmp_path, kills), restarts=kills, timeout_s=PATIENCE_S)
    assert codes == [0] * NUM_RANKS, [agent.printed(rank)[-2000:] for rank in range(NUM_RANKS)]
    check(tmp_path, kills)


@pytest.mark.exhaustive
def test_ranks_killed_ten_times_under_torchrun(tmp_path):
    kills = 10
    prepare(tmp_path, kills)
    done = torchrun(kills, *arguments(tmp_path, kills))
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, kills)


def prepare(folder, kills):
    """Configurations of a run that is killed and of one that is not; the latter runs here, in one process."""
    for name, every in (("straight", 1000), ("killed", 1)):
        config = config_of(folder, name, (kills + 1) * STEPS_PER_LIFE)
        config = config.updated({"train.checkpoint_every": every})
        (folder / f"{name}.json").write_text(config.model_dump_json())
    train_from(folder / "straight.json")


def arguments(folder, kills):
    return folder / "killed.json", kills, folder / "lives"


def check(folder, kills):
    lives = [json.loads(line) for line in (folder / "lives").read_text().splitlines()]
    # As many lives as kills and one more: no restart failed to connect.
    assert [life["number"] for life in lives] == list(range(kills + 1)), lives
    assert_same_lines(lines_of(folder / "killed"), lines_of(folder / "straight"), "loss", "grad_norm")


def config_of(folder, name, steps):
    places = {"train.run_dir": str(folder / name), "data.cache_dir": str(folder / "cache")}
    return RECIPES["gpt-moe-test"]().updated(BASE | places | {"train.steps": steps})


def torchrun(restarts, *words):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(NUM_RANKS)),
        *("--max-restarts", str(restarts), __file__, *map(str, words)),
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # this file imports others of the tests
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * (restarts + 1),
        env=environment,
        check=False,
    )


def train_from(config_file):
    train_quietly(GPTRunConfig.model_validate_json(Path(config_file).read_text()))


def main(config_file, kills, lives):
    """One rank in one life. In all but the last life one rank dies at some moment."""
    number, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    draw = random.Random(number)
    victim = draw.randrange(NUM_RANKS)
    if rank == 0:
        with Path(lives).open("a") as file:
            file.write(json.dumps({"number": number, "victim": victim}) + "\n")
    if number < int(kills) and rank == victim:
        metrics = Path(config_file).parent / "killed" / "metrics.jsonl"
        threading.Thread(target=_die, args=(metrics, draw.uniform(0.0, 0.5)), daemon=True).start()
    train_from(config_file)


def _die(metrics, seconds):
    """Some time after the first step of this life, but before it has done all that it may."""

    def lines():
        return metrics.read_text().count("\n") if metrics.exists() else 0

    first = lines()
    while lines() == first:
        time.sleep(0.002)
    end = time.monotonic() + seconds
    while time.monotonic() < end and lines() < first + STEPS_PER_LIFE:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
