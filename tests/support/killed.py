"""Runs that are killed while they learn."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def kill_after_a_checkpoint(words: Sequence[str], folder: Path) -> None:
    """Train in a process of its own, and kill it when it has written the checkpoint of a step that ends in 2.

    Args:
        words: of `expertmesh train`.
        folder: the run directory that they name.
    """
    command = [sys.executable, "-m", "expertmesh", "train", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        if list(folder.glob("checkpoints/step_*2")):
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert list(folder.glob("checkpoints/step_*2")), "it has no checkpoint to go on from"
