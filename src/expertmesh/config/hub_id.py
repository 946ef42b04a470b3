"""What to type where a model's id of the hub stands in the place of a folder: nothing here downloads."""

import re
from pathlib import Path

from expertmesh.errors import command

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def how_to_fetch(given: str | Path, *, as_run: bool) -> str:
    """How to get a model of the hub, to stand behind the fix of a message; empty where the text is a path of this machine.

    Args:
        given: what the user typed, which is no folder.
        as_run: whether a run is wanted, or the folder as the hub has it is enough.

    Example:
        >>> how_to_fetch("Qwen/Qwen3-30B-A3B", as_run=False)
        '; if it is a model of the hub, download it first: hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B'
    """
    text = str(given)
    if not _ID.fullmatch(text) or Path(text.split("/")[0]).exists():
        return ""
    name = text.split("/")[1]
    fetch = f"; if it is a model of the hub, download it first: hf download {text} --local-dir models/{name}"
    if not as_run:
        return fetch
    return f"{fetch} && {command(f'convert --from models/{name} --to runs/{name}')}"
