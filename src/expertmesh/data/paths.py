"""Entries of `data.path`: files, folders and patterns, each with a weight."""

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
"""Largest weight; a document is repeated so often in the list of training documents and in the tokens on disk."""


class WeightedPath(NamedTuple):
    """An entry of `data.path`."""

    paths: list[Path]  # files and folders that exist, none below another; several where a pattern matches them
    root: Path  # a folder that all of them lie in, which does not depend on what a pattern matches
    weight: float  # number of times that each of its documents is trained on per epoch
    name: str  # its entry of `data.path` without the weight


def find_paths(given: str | tuple[str, ...]) -> list[WeightedPath]:
    """The files and folders of `data.path`, entry by entry.

    An entry is PATH or PATH:WEIGHT. If a path with the whole name exists, colon included, it is PATH.

    Args:
        given: the entries; a pattern with *, ? or [ ] stands for all matches, ** for folders of any depth.
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
            raise ConfigError("data.path", printable(text), f"{what}", "give a text file or a folder")
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
    return [path for path in found if folders.isdisjoint(path.parents)]  # files below a matched folder come with it
