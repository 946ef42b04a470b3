"""Runs of before checkpoints recorded what they belong to: their files and options may be changed."""

import json
from pathlib import Path

from tests.support.mistakes import reseal


def as_older(run: Path) -> Path:
    """Let all checkpoints of a run have its config.json as it is now, and no record of files; returns the run."""
    config = json.loads((run / "config.json").read_text())
    config.pop("recipe", None)
    for folder in (run / "checkpoints").glob("step_*"):
        path = folder / "state.json"
        state = {**json.loads(path.read_text()), "config": config}
        state.pop("files", None)
        path.write_text(json.dumps(state))
        reseal(folder)
    return run
