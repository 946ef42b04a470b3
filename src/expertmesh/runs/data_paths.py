"""Paths of a run's data: whole ones from its start; relative ones of older runs are looked for where they were
trained."""

import glob
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from expertmesh.config.base import expanded
from expertmesh.config.run import RunConfig
from expertmesh.runs.run_dir import Run

_NAMES = (
    *("data.path", "data.encode_with", "data.tokenizer", "data.cache_dir"),
    *("train.init_from", "train.branch_from", "adapter.init_from", "distill.teacher"),
)
"""Options that name files and folders."""


def with_whole_paths(config: RunConfig) -> RunConfig:
    """The configuration of a run that begins, with whole paths in the place of relative ones.

    Names that are no paths, such as names of known data, stay.
    """
    cache = getattr(config.data, "cache_dir", None)
    made = {} if cache is None else {"data.cache_dir": str(expanded(cache).absolute())}
    changes = _wholes(config, Path.cwd()) | made  # the cache is made where it is not there
    return config.updated(changes) if changes else config


def with_data(run: Run, given: Sequence[str] | None = None) -> Run:
    """A run whose data can be read from any folder.

    Args:
        run: the run. Its relative paths are of an older version: they are read from the current folder, or from the one
            that the run was trained in, which its own path tells.
        given: data.path, for data that were moved; None: the run's own.
    """
    if given:
        one = isinstance(getattr(run.config.data, "path", None), str) and len(given) == 1
        path = given[0] if one else tuple(given)
        return replace(run, config=run.config.updated({"data.path": path}))
    parts, own = expanded(run.config.train.run_dir).parts, run.path.absolute().parts
    changes = _wholes(run.config, Path.cwd())
    if own[-len(parts) :] == parts:
        changes = _wholes(run.config, Path(*own[: -len(parts)])) | changes
    return replace(run, config=run.config.updated(changes)) if changes else run


def _wholes(config: RunConfig, base: Path) -> dict[str, object]:
    """Changes to a configuration: whole paths wherever something is there below a folder."""
    changes: dict[str, object] = {}
    for name in _NAMES:
        section, _, field = name.partition(".")
        value = getattr(getattr(config, section), field, None)
        if isinstance(value, str):
            found: object = _whole(value, base)
        elif isinstance(value, tuple):
            found = tuple(_whole(one, base) for one in value)
        else:
            continue
        if found != value:
            changes[name] = found
    return changes


def _whole(text: str, base: Path) -> str:
    """The path below `base`, if its first part is there or is a pattern; with its weight, PATH:WEIGHT."""
    path = expanded(text)
    if path.is_absolute() or not path.parts:
        return str(path)
    first = path.parts[0]
    names = (first, re.sub(":[0-9.]+$", "", first))
    is_there = glob.has_magic(first) or any((base / name).exists() for name in names)
    return str(base / path) if is_there else text
