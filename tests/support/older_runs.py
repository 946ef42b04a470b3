"""Runs of before checkpoints recorded what they belong to: their files and options may be changed."""

import json
from pathlib import Path

from tests.support.mistakes import reseal


def as_older(run: Path) -> Path:
    """Take the record of files and the configuration out of all checkpoints of a run; returns the run."""
    for folder in (run / "checkpoints").glob("step_*"):
        path = folder / "state.json"
        state = json.loads(path.read_text())
        path.write_text(
            json.dumps({k: v for k, v in state.items() if k not in ("files", "config")})
        )
        reseal(folder)
    return run
