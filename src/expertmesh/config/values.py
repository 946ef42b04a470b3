"""Rules of single values: numbers, choices and types, each broken rule in one sentence. Never imports torch."""

import difflib
from collections.abc import Iterable
from math import inf
from numbers import Integral, Real
from typing import Any, NamedTuple

from expertmesh.errors import ConfigError

REAL: tuple[type, ...] = (int, float, Real)
WHOLE: tuple[type, ...] = (int, Integral)
LEAST_INT64, MOST_INT64 = -(2**63), 2**63 - 1


def is_number(value: object, types: type | tuple[type, ...] = REAL) -> bool:
    """Whether a value is a number of these types; bool is none."""
    return isinstance(value, types) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's; else the value itself."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", 1) == 0
    return value.item() if is_scalar else value


def python_number(value: Any) -> Any:
    """A number of NumPy as Python's; else the value itself, also a tensor, whose reading might wait for a device."""
    if value is None or isinstance(value, int | float):
        return value  # before the abstract types, which are slow to ask
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def shown(value: object) -> str:
    """A value for an error message: short, on one line, text without quotes; halves of characters are escaped."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split()) or "''"
    text = text.encode(errors="backslashreplace").decode()  # half a character cannot be printed
    return text if len(text) <= 60 else text[:57] + "..."


def type_of(value: object) -> str:
    """Type of a value with its article, such as "an int"."""
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def quoted(value: object) -> str:
    """A value as Python writes it, short and on one line; of tensors, arrays and huge integers the type."""
    if getattr(value, "ndim", 0) or (isinstance(value, int) and value.bit_length() > 200):
        return type_of(value)
    return shown(str(value) if is_number(value) else repr(value))


def some_of(names: Iterable[str]) -> str:
    """Names for an error message, as many as fit on a line."""
    text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:200].rpartition(', ')[0]}, ..."


class Number(NamedTuple):
    """Rule of a number. It is finite, and never bool."""

    least: float = -inf  # smallest value
    most: float = inf  # largest value
    fix: str = "choose another"  # the fix of another value
    types: tuple[type, ...] = REAL  # types of the number, see `REAL` and `WHOLE`
    is_open: bool = False  # whether `least` itself is refused
    optional: bool = False  # whether None is valid
    limit: str = ""  # name of `most`, such as "num_experts"

    @property
    def rule(self) -> str:
        """The rule in words."""
        kind = "a number" if Real in self.types else "a whole number"
        if self.least == -inf:
            return f"must be {kind}"
        least, most = written(self.least), written(self.most)
        most = f"{self.limit}={most}" if self.limit else most
        if self.most == inf:
            kind = kind.replace("a number", "a finite number")
            return f"must be {kind} {'above' if self.is_open else 'of at least'} {least}"
        if self.is_open:
            return f"must be {kind} above {least} and at most {most}"
        return f"must be {kind} from {least} to {most}"

    def holds(self, value: Any) -> bool:
        """Whether a value keeps the rule."""
        if value is None:
            return self.optional
        if not isinstance(value, self.types) or isinstance(value, bool):
            return False
        number: Any = value
        # no sizes of a graph are compared with infinity
        if (Real in self.types and number in (inf, -inf)) or (self.most != inf and not number <= self.most):
            return False
        return bool(self.least < number if self.is_open else self.least <= number)

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError unless the argument `name` keeps the rule."""
        if not self.holds(value):
            raise ConfigError(name, quoted(value), self.rule, self.fix)


def written(number: float) -> str:
    """A limit for an error message: every digit of a whole number."""
    if number in (MOST_INT64, LEAST_INT64):
        return "2^63 - 1" if number > 0 else "-2^63"
    is_whole = isinstance(number, int) or (number.is_integer() and abs(number) < 2**53)
    return f"{number:,.0f}" if is_whole else f"{number:g}"


def choice_rule(value: object, known: Iterable[object]) -> tuple[str, str]:
    """Rule and fix of a value that is none of the known ones."""
    words = [str(one) for one in known]
    near = difflib.get_close_matches(str(value), words, n=1)
    return (
        f"must be one of {', '.join(words)}",
        f"did you mean {near[0]}?" if near else "choose one",
    )


def other_choice(name: str, value: object, known: Iterable[object]) -> ConfigError:
    """Error of an argument that is none of the known values."""
    return ConfigError(name, shown(value), *choice_rule(value, known))


def check_choice(name: str, value: object, known: Iterable[object]) -> None:
    """Raise ConfigError unless an argument is one of the known values; 1 is not True."""
    known = tuple(known)
    if not any(type(value) is type(one) and value == one for one in known):
        raise other_choice(name, value, known)


def wrong_type(name: str, value: object, what: str, fix: str = "give one") -> ConfigError:
    """Error of an argument of a wrong type; `what` says what it must be."""
    return ConfigError(f"{name} is {type_of(value)}; it must be {what}; {fix}")


def check_type(name: str, value: object, types: type | tuple[type, ...], what: str, fix: str = "give one") -> None:
    """Raise ConfigError unless an argument is of these types; `what` says what it must be."""
    if not isinstance(value, types):
        raise wrong_type(name, value, what, fix)
