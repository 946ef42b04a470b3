"""`kill -9` at any moment leaves a run that goes on as if nothing had happened.

This file is also a program: it imports torch once and forks a child per life of the run, because importing takes longer
than living.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.patience import PATIENCE_S

SEED = 7
# No life gets further than this, so that a fast machine cannot finish before the last of them.
STEPS_PER_LIFE = 2
# Where a save can be cut: before and after every function that changes the disk.
STAGES = ("write_tensors", "_write_manifest", "_sync", "_sha256", "_delete", "_prune")


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
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(config_file), str(kills)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lives = json.loads(done.stdout.splitlines()[-1])
    assert [life["status"] for life in lives[:-1]] == [signal.SIGKILL] * kills, lives
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
    from rich.console import Console

    from expertmesh.config.gpt import GPTRunConfig
    from expertmesh.training import checkpoint
    from expertmesh.training.loop import train

    if stage is not None:
        _die_at(checkpoint, stage, call)
    config = GPTRunConfig.model_validate_json(Path(config_file).read_text())
    train(config, recipe="gpt-moe-test", console=Console(quiet=True))


def _die_at(checkpoint, stage, call):
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
    child = os.fork()
    if child == 0:
        try:
            live(config_file, stage, call)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        _wait(Path(config_file).parent / "killed", seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _wait(run_dir, seconds):
    """Until the time is over, or the child has done its steps."""
    end = time.monotonic() + seconds
    first = _newest(run_dir)
    while time.monotonic() < end and _newest(run_dir) < first + STEPS_PER_LIFE:
        time.sleep(0.003)


def _newest(run_dir):
    names = [path.name for path in run_dir.glob("checkpoints/step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def main(config_file, kills):
    import torch

    import expertmesh.training.loop  # noqa: F401  # imported here so that the children need not

    torch.set_num_threads(1)
    generator = random.Random(SEED)
    lives = []
    for number in range(int(kills)):
        if number % 2:
            stage, call, seconds = generator.choice(STAGES), generator.randint(1, 6), None
        else:
            stage, call, seconds = None, 0, generator.uniform(0.05, 1.0)
        status = one_life(config_file, stage, call, seconds)
        lives.append({"stage": stage, "call": call, "seconds": seconds, "status": status})
    status = one_life(config_file, None, 0, None)
    lives.append({"stage": "last", "status": status})
    sys.stdout.write(json.dumps(lives) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
