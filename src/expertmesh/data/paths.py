"""What `data.path` names: files, folders, patterns, each with a weight."""

import glob
import re
from pathlib import Path
from typing import NamedTuple

from expertmesh.config.base import expanded
from expertmesh.data.files import printable
from expertmesh.errors import ConfigError


class WeightedPath(NamedTuple):
    """One of the places of a text.

    Attributes:
        path: a file or a folder that exists.
        weight: how often each of its documents is trained on per epoch.
    """

    path: Path
    weight: float


def find_paths(given: str | tuple[str, ...]) -> list[WeightedPath]:
    """The files and folders that are meant.

    A place is PATH or PATH:WEIGHT. The weight stands with its path, so that places can be added and left out without counting;
    what exists under the whole name is a path, colon and all.

    Args:
        given: places; a pattern with *, ? or [ ] stands for all that match, ** for folders of any depth.

    Raises:
        ConfigError: nothing is there, or a weight is none.
    """
    found: list[WeightedPath] = []
    for text in (given,) if isinstance(given, str) else given:
        paths, weight = _matching(text), 1.0
        named = re.fullmatch(r"(.+):([0-9.]+)", text)
        if not paths and named is not None:
            paths, weight = _matching(named[1]), _weight(named[2], text)
        if not paths:
            what = "matches nothing" if glob.has_magic(text) else "does not exist"
            raise ConfigError(f"data.path={printable(text)}: {what}; give a text file or a folder")
        found += [WeightedPath(path, weight) for path in paths]
    if len(found) == 1 and found[0].weight != 1:
        raise ConfigError(
            f"data.path={printable(str(given))}: a weight says how often beside other paths; leave it out, or name another path"
        )
    return found


def _weight(digits: str, text: str) -> float:
    try:
        weight = float(digits)
    except ValueError:
        weight = 0.0
    if weight <= 0:
        raise ConfigError(
            f"data.path={printable(text)}: the weight must be above 0; write for example :2, or leave the path out"
        )
    return weight


def _matching(text: str) -> list[Path]:
    path = expanded(text)
    if path.exists():
        return [path]
    if not glob.has_magic(text):
        return []
    return [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
