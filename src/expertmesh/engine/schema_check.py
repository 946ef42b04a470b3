"""Check of a whole answer against its schema: JSON Schema of draft 2020-12, as far as the compiler knows it.

Numbers are the decimals that are written, and must fit as FP64, too. Every pair of a schema and a value is looked at
once, so that no schema makes it slow.
"""

import json
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote

_MOST_STEPS = 300_000
"""Maximum pairs of a schema and a value: some tenths of a second."""
_KINDS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, Decimal),
    "integer": lambda value: isinstance(value, Decimal) and value == value.to_integral_value(),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class SchemaCheck:
    """Check of answers against a schema. `anchors`: JSON pointers of its `$anchor`s."""

    def __init__(self, text: str, anchors: Mapping[str, str], matches: Callable[[str, str], bool]) -> None:
        self._root = _parsed(text)
        self._anchors = anchors
        self.matches = matches  # whether a regular expression is found in a text
        self._allowed: dict[int, set[Any]] = {}  # values of each `enum`

    def problem(self, text: str) -> str | None:
        """Reason why a text is no JSON that fits the schema; None: it is."""
        try:
            value = _parsed(text)
            fits = _Fit(self).fits(self._root, value)
        except (ValueError, RecursionError):
            return "the answer is no JSON"
        except _TooManyStepsError:
            return "the answer is too large to be checked"
        return None if fits else "the answer does not validate"

    def target(self, reference: str) -> Any:
        """Schema that a `$ref` leads to."""
        place = unquote(reference[1:])
        place = self._anchors.get(place, f"#{place}")[1:]
        node = self._root
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            node = node[int(step)] if isinstance(node, list) else node[step]
        return node

    def is_listed(self, values: list[Any], value: Any) -> bool:
        """Whether a value is one of an `enum`."""
        if id(values) not in self._allowed:
            self._allowed[id(values)] = {_key(one) for one in values}
        return _key(value) in self._allowed[id(values)]


class _TooManyStepsError(Exception):
    """The check would take too long."""


class _Fit:
    """State of a check, which remembers every pair of a schema and a value."""

    def __init__(self, check: SchemaCheck) -> None:
        self._check = check
        self._known: dict[tuple[int, int], bool] = {}

    def fits(self, schema: Any, value: Any) -> bool:
        """Whether a value fits a schema; one that refers to itself fits nothing."""
        if isinstance(schema, bool):
            return schema
        pair = id(schema), id(value)
        if pair not in self._known:
            if len(self._known) >= _MOST_STEPS:
                raise _TooManyStepsError
            self._known[pair] = False
            self._known[pair] = self._fits(schema, value)
        return self._known[pair]

    def _fits(self, schema: dict[str, Any], value: Any) -> bool:
        if "type" in schema:
            kinds = schema["type"]
            kinds = kinds if isinstance(kinds, list) else [kinds]
            if not any(_KINDS[kind](value) for kind in kinds):
                return False
        if "const" in schema and _key(schema["const"]) != _key(value):
            return False
        if "enum" in schema and not self._check.is_listed(schema["enum"], value):
            return False
        if "$ref" in schema and not self.fits(self._check.target(schema["$ref"]), value):
            return False
        if not all(self.fits(one, value) for one in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self.fits(one, value) for one in schema["anyOf"]):
            return False
        if "oneOf" in schema and sum(self.fits(one, value) for one in schema["oneOf"]) != 1:
            return False
        if isinstance(value, Decimal):
            return _fits_number(schema, value)
        if isinstance(value, str):
            return _is_between(schema, "Length", len(value)) and (
                "pattern" not in schema or self._check.matches(schema["pattern"], value)
            )
        if isinstance(value, list):
            return self._fits_list(schema, value)
        return not isinstance(value, dict) or self._fits_object(schema, value)

    def _fits_list(self, schema: dict[str, Any], values: list[Any]) -> bool:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems", True)
        later = values[len(first) :]
        return (
            _is_between(schema, "Items", len(values))
            and all(self.fits(one, value) for one, value in zip(first, values, strict=False))
            and all(self.fits(rest, value) for value in later)
        )

    def _fits_object(self, schema: dict[str, Any], value: dict[str, Any]) -> bool:
        named, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        patterns = schema.get("patternProperties", {})
        if not _is_between(schema, "Properties", len(value)):
            return False
        if any(name not in value for name in schema.get("required", ())):
            return False
        for name, one in value.items():
            its = [named[name]] if name in named else []
            its += [s for p, s in patterns.items() if self._check.matches(p, name)]
            if not all(self.fits(schema_, one) for schema_ in its or [rest]):
                return False
        return True


def _fits_number(schema: dict[str, Any], value: Decimal) -> bool:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if isinstance(above, bool):  # of draft 4
        low, above = (None, low) if above else (low, None)
    if isinstance(below, bool):
        high, below = (None, high) if below else (high, None)
    for number in (value, float(value)):
        known: Any = float if isinstance(number, float) else Decimal
        if low is not None and not number >= known(low):
            return False
        if high is not None and not number <= known(high):
            return False
        if above is not None and not number > known(above):
            return False
        if below is not None and not number < known(below):
            return False
    return "multipleOf" not in schema or _is_multiple(value, schema["multipleOf"])


def _is_multiple(value: Decimal, of: Decimal) -> bool:
    """Whether a decimal is a multiple of another one, however long both are."""
    if not value:
        return True
    (_, digits, exponent), (_, their_digits, their_exponent) = value.as_tuple(), of.as_tuple()
    ours, theirs = (int(Decimal((0, part, 0))) for part in (digits, their_digits))  # exact
    shift = int(exponent) - int(their_exponent)
    if shift >= 0:
        return ours * pow(10, shift, theirs) % theirs == 0
    return -shift <= len(digits) and ours % (theirs * 10**-shift) == 0


def _is_between(schema: dict[str, Any], what: str, count: int) -> bool:
    lowest, highest = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    return bool(lowest <= count and (highest is None or count <= highest))


def _key(value: Any) -> Any:
    """Hashable form of a JSON value; equal ones have the same."""
    if isinstance(value, list):
        return "list", *map(_key, value)
    if isinstance(value, dict):
        return "object", frozenset((name, _key(one)) for name, one in value.items())
    return type(value), value


def _parsed(text: str) -> Any:
    """JSON with decimals as numbers; raises ValueError if it is none."""
    return json.loads(text, parse_float=_decimal, parse_int=Decimal, parse_constant=_refuse)


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text[:40]} has too large an exponent") from None


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
