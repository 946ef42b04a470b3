"""Checks of the arguments of `plan` and `serve_plan`: type and range, an error of one line each."""

import os
from typing import Any

from expertmesh.config.cluster import Cluster
from expertmesh.config.values import WHOLE, Number, quoted
from expertmesh.costs.hardware import find_cluster
from expertmesh.errors import ConfigError

MOST_AT_ONCE = 2**36
"""Largest number of tokens of a step or sequence, and of sequences at once: a thousand times what has been done."""
MOST_TOKENS = 10**18
"""Largest number of tokens of a training: ten thousand times what has been done."""
MOST_IMBALANCE = 2**20
"""Largest imbalance: all rows on one of as many devices as a cluster can have."""


def whole(name: str, value: Any, *, most: int, fix: str) -> int:
    """A whole number from 1 to `most` as an int; NumPy's are taken, too."""
    Number(1, most, fix, types=WHOLE).check(name, value)
    return int(value)


def number(name: str, value: Any, *, most: int, fix: str, least: float = 1) -> float:
    """A finite number from `least` to `most` as a float; NumPy's are taken, too."""
    Number(least, most, fix).check(name, value)
    return float(value)


def path_text(name: str, value: object, what: str) -> str:
    """Text of a name or path. `what`: what it may be, for the message."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(name, quoted(value), f"must be {what}", "give one")
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(name, ascii(text)[:60], "must be text without NUL", "correct it")
    return text


def cluster_of(cluster: object) -> Cluster:
    """A cluster from the argument of this name."""
    if isinstance(cluster, Cluster):
        return cluster
    return find_cluster(path_text("cluster", cluster, "a name like h100x64, a file or a Cluster"))
