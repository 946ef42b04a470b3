"""Renamed options: the former name is still read, and one log line gives the current one. Never imports torch."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from expertmesh.errors import ConfigError, Line, named

RENAMED = {"shadow_experts": "replicated_experts"}
"""Current names of options by former name, without sections."""

BOTH_GIVEN = "is a former name, and is given beside"
"""Rule of the error for an option that is given by both of its names."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_log = logging.getLogger("expertmesh.config")


def current_name(name: str) -> str:
    """The current name of an option, dotted or not; a former name is logged, once in a process."""
    section, dot, last = name.rpartition(".")
    if last not in RENAMED:
        return name
    current = f"{section}{dot}{RENAMED[last]}"
    _say(name, current)
    return current


@functools.cache
def _say(former: str, current: str) -> None:
    _log.warning(Line(f"{named(former)} is called {named(current)} now; both are read"))


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the current names of their options."""
    found = {}
    for name, value in values.items():
        current = current_name(name)
        if current != name and current in values:
            raise ConfigError(name, value, f"{BOTH_GIVEN} {named(current)}", "leave it out")
        found[current] = value
    return found


def reads_former_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: the function accepts its keywords by their former names, too."""

    @functools.wraps(function)
    def read(*args: _P.args, **values: _P.kwargs) -> _T:
        if RENAMED.keys().isdisjoint(values):
            return function(*args, **values)
        return function(*args, **with_current_names(values))

    return read
