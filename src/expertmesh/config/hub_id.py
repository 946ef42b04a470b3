"""What to type where a model's id of the hub stands in the place of a folder: nothing here downloads."""

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def how_to_fetch(given: str | Path) -> str:
    """How to get a model of the hub, to stand behind the fix of a message; empty where the text is a path of this machine.

    Args:
        given: what the user typed, which is no folder.

    Example:
        >>> how_to_fetch("Qwen/Qwen3-30B-A3B")
        '; if it is a model of the hub, download it first: hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B'
    """
    text = str(given)
    if not _ID.fullmatch(text) or Path(text.split("/")[0]).exists():
        return ""
    name = text.split("/")[1]
    return f"; if it is a model of the hub, download it first: hf download {text} --local-dir models/{name}"
