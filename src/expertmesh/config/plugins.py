"""Tables of objects by name that other packages add to: model families, verbs, architectures of the hub."""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from expertmesh.errors import ConfigError, text_of

Kind = TypeVar("Kind")


class Plugins(Mapping[str, Kind]):
    """Objects of one kind by name, each imported when it is asked for; iteration leaves out those that cannot be.

    Args:
        ours: objects of this distribution by name, or the "module:name" of one, whose package may be absent. They win
            over entry points.
    """

    def __init__(
        self,
        option: str,  # word for the kind in messages, for example "family"
        kind: type[Kind],  # class of the objects
        group: str,  # group of entry points by which installed packages add objects
        ours: Mapping[str, Kind | str] | None = None,
        *,
        key: str = "name",  # attribute of the objects that has their name
    ) -> None:
        self._option, self._kind, self._group, self._key = option, kind, group, key
        self._ours = ours or {}
        self._loaded: dict[EntryPoint, Kind] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All names, also of objects that cannot be imported; imports nothing."""
        return tuple(dict.fromkeys([*self._ours, *sorted(entry_points(group=self._group).names)]))

    def __getitem__(self, name: str) -> Kind:
        """The object of a name."""
        given = self._ours.get(name) if isinstance(name, str) else None
        if isinstance(given, str):
            return self._load(EntryPoint(name, given, self._group))
        if given is not None:
            return given
        for point in entry_points(group=self._group, name=name):
            return self._load(point)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Names of the objects that can be imported."""
        return filter(self.__contains__, self.names)

    def __len__(self) -> int:
        """Number of the objects that can be imported."""
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """Whether there is such an object and it can be imported."""
        try:
            self[name]  # type: ignore[index]
        except (KeyError, ConfigError):
            return False
        return True

    def _load(self, point: EntryPoint) -> Kind:
        if point not in self._loaded:
            self._loaded[point] = self._checked(point, self._imported(point))
        return self._loaded[point]

    def _imported(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as error:  # whatever a package does while it is imported
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            if absent and f"{point.module}.".startswith(f"{absent}."):
                problem = f"is in the package {absent}, which is not installed"
                fix = "install it, or add its folder to PYTHONPATH"
            else:
                problem = f"{self._place(point)} cannot be imported ({text_of(error)})"
                fix = "repair that package or take it away"
            raise ConfigError(self._option, point.name, problem, fix) from error

    def _checked(self, point: EntryPoint, found: Any) -> Kind:
        if isinstance(found, self._kind) and getattr(found, self._key) == point.name:
            return found
        kind = self._kind.__name__
        raise ConfigError(
            self._option,
            point.name,
            f"{self._place(point)} is no {kind} of this {self._option}",
            "name there one that is",
        )

    def _place(self, point: EntryPoint) -> str:
        return f"{point.value} in the entry points {self._group}"
