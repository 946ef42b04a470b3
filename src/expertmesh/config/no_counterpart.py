"""Names of another system that its door has not: an error says what to use instead."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

from expertmesh.errors import ConfigError


def line(name: str, way_out: str) -> str:
    """The error's text."""
    return f"{name} has no counterpart here; {way_out}"


def refusing(module: str, refused: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """`__getattr__` of the door's module that stands for a module of the other system; `refused` has the ways out by
    full name."""

    def missing(name: str) -> NoReturn:
        full = f"{module}.{name}"
        if full in refused:
            raise ConfigError(line(full, refused[full]))
        raise AttributeError(f"module {module!r} of the door has no attribute {name!r}")

    return missing


class RefusedAttributes:
    """Mixin for a door's class: `refused` has the ways out by the names of attributes that are not served."""

    refused: ClassVar[Mapping[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the way out."""
        if (way_out := type(self).refused.get(name)) is not None:
            raise AttributeError(line(name, way_out))
        found = getattr(super(), "__getattr__", None)  # torch's, of modules
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return found(name)
