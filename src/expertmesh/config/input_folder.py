"""Check that a folder from elsewhere holds regular files only: no pipes, sockets or devices."""

import os
import stat
from pathlib import Path

from expertmesh.errors import ConfigError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_DEPTH = 3  # run, checkpoints, step


def check_only_files(folder: Path, *, what: str, depth: int = _DEPTH) -> None:
    """Refuse a folder with pipes, sockets or devices, where a read may never end. Links are followed.

    Args:
        folder: the folder to check; a path that is missing or no folder passes.
        what: name of the folder in messages, for example "run runs/x".
        depth: levels of folders to look into.
    """
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link to nothing, or to itself
            continue
        if stat.S_ISDIR(mode) and depth > 1:
            check_only_files(Path(entry.path), what=what, depth=depth - 1)
        if (kind := _KINDS.get(stat.S_IFMT(mode))) is not None:
            raise ConfigError(
                f"{what}: {entry.path} is {kind}, not a file; put the file in its place, or take it out of the folder"
            )
