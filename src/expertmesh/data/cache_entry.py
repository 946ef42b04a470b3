"""Folders that are computed once, however many processes want them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from expertmesh.data.shards import exclusive
from expertmesh.errors import ConfigError

INDEX = "index.json"
"""File that a complete entry has."""


def fill_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder unless it is complete. Any number of processes may call at once: one fills, the others wait for it.

    The folder appears by one rename, so a process killed half-way leaves no half entry.

    Args:
        folder: of the entry; its parent is made.
        fill: writes the entry into the folder that it is given, the file `INDEX` among it.

    Raises:
        ConfigError: the parent is a file.
    """
    if (folder / INDEX).exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            f"data.cache_dir={folder.parent}: is a file or below a file; choose a folder"
        ) from None
    with exclusive(folder.with_name(f"{folder.name}.lock")):
        if (folder / INDEX).exists():
            return
        partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            fill(partial)
            if folder.exists():
                shutil.rmtree(folder)  # without an index it is the leftover of a deletion
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
