"""`kill -9` at any moment leaves a run that goes on as if nothing had happened."""

import json
import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.support.nursery import the_nursery

from expertmesh.checkpoints import store as checkpoint
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.training.loop import train

SEED = 7
# No life gets further than this, so that a fast machine cannot finish before the last of them.
STEPS_PER_LIFE = 2
# Where a save can be cut: before and after every function that changes the disk.
STAGES = ("write_tensors", "_write_manifest", "_sync", "_flushed", "_delete", "prune")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_run_survives_being_killed_many_times(tiny, run_quietly, tmp_path, kills):
    changes = {"train.steps": kills * (STEPS_PER_LIFE + 2), "train.keep_last": 1}
    changes |= {"train.checkpoint_every": 1, "train.eval_every": 10}
    straight = tiny(**changes, **{"train.run_dir": str(tmp_path / "straight")})
    run_quietly(straight)
    config = straight.updated({"train.run_dir": str(tmp_path / "killed"), "train.resume": "auto"})
    config_file = tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    lives = lives_of(config_file, kills)
    assert [life["status"] for life in lives[:-1]] == [-signal.SIGKILL] * kills, lives
    assert lives[-1]["status"] == 0
    assert len({life["stage"] for life in lives}) > 4, lives
    killed, whole = (
        [
            {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("killed", "straight")
    )
    assert killed == whole


def live(config_file, stage, call):
    """Child: train; die at the n-th call of a stage, if one is given."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if stage is not None:
        _die_at(stage, call)
    config = GPTRunConfig.model_validate_json(Path(config_file).read_text())
    train(config, recipe="gpt-moe-test", console=Console(quiet=True))


def _die_at(stage, call):
    owner = checkpoint.CheckpointStore if hasattr(checkpoint.CheckpointStore, stage) else checkpoint
    function = getattr(owner, stage)
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        # Odd numbers die before the call, even ones after it.
        if len(calls) == (call + 1) // 2 and call % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if len(calls) == (call + 1) // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, stage, wrapped)


def one_life(config_file, stage, call, seconds):
    """Fork a child and wait for its end; kill it after some seconds, if it has no stage to die at."""
    child = the_nursery().start(live, config_file, stage, call)
    if seconds is not None:
        _wait(config_file.parent / "killed", seconds)
        child.kill()
    child.join()
    return child.exitcode


def _wait(run_dir, seconds):
    """Until the time is over, or the child has done its steps."""
    end = time.monotonic() + seconds
    first = _newest(run_dir)
    while time.monotonic() < end and _newest(run_dir) < first + STEPS_PER_LIFE:
        time.sleep(0.003)


def _newest(run_dir):
    names = [path.name for path in run_dir.glob("checkpoints/step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def lives_of(config_file, kills):
    """Die so often, then live to the end."""
    the_nursery().import_modules("torch._dynamo")  # takes longer than living
    generator, lives = random.Random(SEED), []
    for number in range(kills):
        if number % 2:
            stage, call, seconds = generator.choice(STAGES), generator.randint(1, 6), None
        else:
            stage, call, seconds = None, 0, generator.uniform(0.05, 1.0)
        status = one_life(config_file, stage, call, seconds)
        lives.append({"stage": stage, "call": call, "seconds": seconds, "status": status})
    return [*lives, {"stage": "last", "status": one_life(config_file, None, 0, None)}]
