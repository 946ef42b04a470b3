"""Runs of before checkpoints recorded what they belong to: their files and options may be changed."""

import json
from pathlib import Path

from expertmesh.checkpoints.manifest import described, write_manifest


def as_older(run: Path) -> Path:
    """Take the record of files and the configuration out of all checkpoints of a run; returns the run."""
    for folder in (run / "checkpoints").glob("step_*"):
        path = folder / "state.json"
        state = json.loads(path.read_text())
        for name in ("files", "config"):
            state.pop(name, None)
        path.write_text(json.dumps(state))
        files = json.loads((folder / "manifest.json").read_text())["files"]
        write_manifest(folder, files | {path.name: described(path)})
    return run
