"""Hint for a hub id given in place of a folder: the command that downloads the model. Nothing here downloads."""

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def how_to_fetch(given: str | Path) -> str:
    """Hint to download a model of the hub, to append to an error's fix; empty where the text is no hub id.

    Example:
        >>> how_to_fetch("Qwen/Qwen3-30B-A3B")
        '; if it is a model of the hub, download it first: hf download Qwen/Qwen3-30B-A3B --local-dir
        models/Qwen3-30B-A3B'
    """
    text = str(given)
    if not _ID.fullmatch(text) or Path(text.split("/")[0]).exists():
        return ""
    name = text.split("/")[1]
    return f"; if it is a model of the hub, download it first: hf download {text} --local-dir models/{name}"
