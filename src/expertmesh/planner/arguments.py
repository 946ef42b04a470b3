"""Checks of the arguments of `plan` and `serve_plan`: type and range, an error of one line each."""

import os
from numbers import Integral, Real
from typing import Any

from expertmesh.config.base import shown
from expertmesh.config.cluster import Cluster
from expertmesh.costs.hardware import find_cluster
from expertmesh.errors import ConfigError

MOST_AT_ONCE = 2**36
"""Largest number of tokens of a step or sequence, and of sequences at once: a thousand times what has been done."""
MOST_TOKENS = 10**18
"""Largest number of tokens of a training: ten thousand times what has been done."""
MOST_IMBALANCE = 2**20
"""Largest imbalance: all rows on one of as many devices as a cluster can have."""


def whole(name: str, value: object, *, most: int, fix: str) -> int:
    """A whole number of at least 1 as an int; NumPy's are taken, too.

    Args:
        name: name of the argument.
        value: its value.
        most: largest allowed number.
        fix: fix for another value.

    Raises:
        ConfigError: the value is no whole number, or out of range.
    """
    return int(_from_one(name, value, Integral, "a whole number", most=most, fix=fix))


def number(name: str, value: object, *, most: int, fix: str) -> float:
    """A finite number of at least 1 as a float; NumPy's are taken, too.

    Args:
        name: name of the argument.
        value: its value.
        most: largest allowed number.
        fix: fix for another value.

    Raises:
        ConfigError: the value is no number, or out of range.
    """
    return float(_from_one(name, value, Real, "a number", most=most, fix=fix))


def _from_one(name: str, value: Any, kind: Any, what: str, *, most: int, fix: str) -> Any:
    """The value, if it is of a kind of numbers and from 1 to a bound; else raise ConfigError."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not (is_number and 1 <= value <= most):  # NaN is in no range
        said = str(value) if is_number else repr(value)
        raise ConfigError(name, shown(said), f"must be {what} from 1 to {most:,}", fix)
    return value


def one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse another value than the known words.

    Raises:
        ConfigError: the value is none of them.
    """
    if value not in known:
        said = value if isinstance(value, str) else repr(value)
        raise ConfigError(name, shown(said), f"must be one of {', '.join(known)}", "choose one")


def path_text(name: str, value: object, what: str) -> str:
    """Text of a name or path.

    Args:
        name: name of the argument.
        value: its value.
        what: what it may be, for the message.

    Raises:
        ConfigError: the value is neither text nor a path, or text that is no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(name, shown(repr(value)), f"must be {what}", "give one")
    text = os.fspath(value)
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(name, ascii(text)[:60], "must be text without NUL", "correct it")
    return text


def cluster_of(cluster: object) -> Cluster:
    """A cluster from the argument of this name.

    Raises:
        ConfigError: it is no cluster, name or path; or see `find_cluster`.
    """
    if isinstance(cluster, Cluster):
        return cluster
    return find_cluster(path_text("cluster", cluster, "a name like h100x64, a file or a Cluster"))
