"""What `data.path` names: files, folders, patterns, each with a weight."""

import glob
import re
from collections.abc import Iterable
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple

from expertmesh.config.base import expanded
from expertmesh.data.files import printable
from expertmesh.errors import ConfigError

_MOST = 1000
"""The largest weight: a document stands in the list of the training documents, and in the tokens on disk, so often."""


class WeightedPath(NamedTuple):
    """One of the places of a text.

    Attributes:
        paths: files and folders that exist, none below another; several where a pattern matches them.
        root: a folder that all of them lie in, which does not depend on what a pattern matches.
        weight: how often each of its documents is trained on per epoch.
        name: its entry of `data.path` without the weight.
    """

    paths: list[Path]
    root: Path
    weight: float
    name: str


def find_paths(given: str | tuple[str, ...]) -> list[WeightedPath]:
    """The files and folders that are meant, a place for each entry.

    A place is PATH or PATH:WEIGHT. The weight stands with its path, so that places can be added and left out without counting;
    what exists under the whole name is a path, colon and all.

    Args:
        given: places; a pattern with *, ? or [ ] stands for all that match, ** for folders of any depth.

    Raises:
        ConfigError: nothing is there, or a weight is none.
    """
    found: list[WeightedPath] = []
    for text in (given,) if isinstance(given, str) else given:
        paths, weight, name = _matching(text), 1.0, text
        named = re.fullmatch(r"(.+):([0-9.]+)", text)
        if not paths and named is not None:
            name = named[1]
            paths, weight = _matching(name), _weight(named[2], text)
        if not paths:
            what = "matches nothing" if glob.has_magic(text) else "does not exist"
            raise ConfigError(
                "data.path", printable(text), f"{what}", "give a text file or a folder"
            )
        pattern = expanded(name)
        root = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts))
        found.append(WeightedPath(paths, root, weight, str(pattern)))
    if len(found) == 1 and found[0].weight != 1:
        raise ConfigError(
            "data.path",
            printable(str(given)),
            "a weight says how often beside other paths",
            "leave it out, or name another path",
        )
    return found


def distinct(names: Iterable[str]) -> list[str]:
    """The names in their order; one that was there before gets a number: a, b, a (2)."""
    found: dict[str, None] = {}
    for name in names:
        own = (name if n == 1 else f"{name} ({n})" for n in count(1))
        found[next(candidate for candidate in own if candidate not in found)] = None
    return list(found)


def _weight(digits: str, text: str) -> float:
    try:
        weight = float(digits)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= _MOST:
        raise ConfigError(
            "data.path",
            printable(text),
            f"the weight must be above 0 and at most {_MOST:,}",
            "write for example :2, leave the path out, or lower the weights of the others",
        )
    return weight


def _matching(text: str) -> list[Path]:
    path = expanded(text)
    if path.exists():
        return [path]
    if not glob.has_magic(text):
        return []
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    folders = {path for path in found if path.is_dir()}
    return [path for path in found if folders.isdisjoint(path.parents)]  # a folder has them
