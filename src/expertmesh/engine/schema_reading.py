"""JSON schemas before they are compiled: what llguidance would not keep exactly is refused by name, or rewritten.

A rewritten schema allows no value that the given one does not allow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any
from urllib.parse import unquote

from expertmesh.engine.schema_patterns import readable_pattern

MOST_CHARACTERS = 2**20
MOST_VALUES = 10_000
"""Maximum values of all lists of a schema's `enum` together."""
MOST_MULTIPLE = 100_000
"""Maximum of `multipleOf` without its decimal point: the compiler's work grows with it."""
_DEEPEST = 128
_EXACT = 2**53
"""Largest whole number up to which the compiler, which reads FP64, knows all."""
_INT64 = 2**63 - 1024
"""Largest whole number of 64 bits that is one of FP64, too; bounds beyond it are this one."""
_PLACES, _DIGITS = 18, 15
"""Decimal places and digits that the compiler reads exactly."""
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = f"^({_YEAR}-(0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-([01][0-9]|2[0-8])|{_LEAP}-02-29)"
_SECOND = ":[0-5][0-9](\\.[0-9]+)?([zZ]|[+-][0-9]{2}:[0-9]{2})$"
_FORMATS: dict[str, list[dict[str, Any]]] = {
    "date": [{"pattern": f"{_DAY}$"}],
    "date-time": [{"pattern": _DAY}, {"pattern": _SECOND}],
    "time": [{"pattern": _SECOND}],
    "hostname": [{"maxLength": 253}],
}
"""Rules that the compiler's formats do not know: leap years, 60 seconds of a minute, the length of a host's name."""
_DEFINED = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
"""Formats of JSON Schema 2020-12; others (`password`, `binary`, `path`) say nothing of values, as annotations."""
_ONE = ("additionalProperties", "items", "additionalItems")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")


class SchemaError(ValueError):
    """A schema cannot be kept; the message says why."""


@dataclass
class ReadSchema:
    """Schema that is ready to be compiled."""

    schema: Any  # the rewritten schema
    patterns: dict[str, str] = field(default_factory=dict)  # rewritten regular expressions by given ones
    anchors: dict[str, str] = field(default_factory=dict)  # places of `$anchor` in the given schema, as JSON pointers


def read_schema(schema: Mapping[str, Any]) -> ReadSchema:
    """A schema that is ready to be compiled."""
    reader = _Reader(str(schema.get("$schema", "")))
    rewritten = reader.read(schema, "#", 0)
    for name in reader.references:
        target = f"#{unquote(name[1:])}"
        if target not in reader.places and target[1:] not in reader.found.anchors:
            raise SchemaError(
                f"$ref={name[:60]!r}: must lead to a schema within this one (#/$defs/NAME), or it is not present"
            )
    reader.found.schema = rewritten
    return reader.found


class _Reader:
    """Walk through all schemas within a schema."""

    def __init__(self, draft: str) -> None:
        self.found = ReadSchema(None)  # what was found
        self.places: set[str] = set()  # JSON pointers of all schemas
        self.references: set[str] = set()  # values of `$ref`
        self._is_old = any(old in draft for old in _OLD_DRAFTS)
        self._num_values = 0

    def read(self, schema: Any, place: str, depth: int) -> Any:
        """Rewritten schema at a place."""
        self.places.add(place)
        if not isinstance(schema, dict):
            return schema
        if depth > _DEEPEST:
            raise SchemaError(f"it is nested beyond the recursion limit of {_DEEPEST} levels")
        self._check_places(schema, place)
        node = dict(schema)
        for name in _ONE:
            if isinstance(node.get(name), dict):
                node[name] = self.read(node[name], f"{place}/{name}", depth + 1)
            elif name in node:
                self.places.add(f"{place}/{name}")
        for name in (*_LISTS, "items"):
            if isinstance(node.get(name), list):
                node[name] = [self.read(one, f"{place}/{name}/{i}", depth + 1) for i, one in enumerate(node[name])]
        for name in _NAMED:
            if isinstance(node.get(name), dict):
                node[name] = {
                    self._key(key, name): self.read(one, f"{place}/{name}/{_step(key)}", depth + 1)
                    for key, one in node[name].items()
                }
        self._read_values(node)
        _read_numbers(node)
        if isinstance(node.get("pattern"), str):
            node["pattern"] = self._pattern(node["pattern"])
        form = node.get("format")
        if isinstance(form, str) and form not in _DEFINED:
            del node["format"]
        if more := _FORMATS.get(form) if isinstance(form, str) else None:
            others = node.get("allOf", [])
            node["allOf"] = [*others, *more] if isinstance(others, list) else others
        return node

    def _check_places(self, schema: dict[str, Any], place: str) -> None:
        """Keep references and anchors; refuse what other programs read in another way."""
        if isinstance(name := schema.get("$ref"), str):
            self.references.add(name)
        if isinstance(name := schema.get("$anchor"), str):
            self.found.anchors[name] = place
        for name in ("$id", "id"):
            if place != "#" and isinstance(schema.get(name), str):
                raise SchemaError(f"{name}: is kept at the top alone; leave it out below")
        if "prefixItems" in schema and (
            self._is_old or "additionalItems" in schema or isinstance(schema.get("items"), list)
        ):
            raise SchemaError("prefixItems: belongs to draft 2020-12, beside items that are one schema")
        if schema.get("uniqueItems"):
            raise SchemaError("uniqueItems: is not kept; use a list where items may repeat")
        least, required = schema.get("minProperties"), schema.get("required", ())
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > num_required + 1:
            raise SchemaError(
                f"minProperties={least}: is kept up to one more than are required, since names may repeat"
            )

    def _key(self, key: str, where: str) -> str:
        return self._pattern(key) if where == "patternProperties" else key

    def _pattern(self, given: str) -> str:
        try:
            found = self.found.patterns[given] = readable_pattern(given)
        except ValueError as error:
            raise SchemaError(f"pattern={given[:60]!r}: {error}") from None
        return found

    def _read_values(self, node: dict[str, Any]) -> None:
        """Check the numbers of `enum` and `const`, and count them."""
        values = node.get("enum")
        if isinstance(values, list):
            self._num_values += len(values)
            if self._num_values > MOST_VALUES:
                raise SchemaError(f"enum: has more than {MOST_VALUES} values in all")
        for name in ("enum", "const"):
            if name in node:
                _check_exact(node[name], name)
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]


def _step(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _check_exact(value: Any, name: str) -> None:
    """Raise SchemaError if a number within a value is none that the compiler reads exactly."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, int) and abs(one) > _EXACT:
            raise SchemaError(f"{name}={str(one)[:40]}: whole numbers go to 2^53")
        elif isinstance(one, float):
            _, digits, exponent = Decimal(repr(one)).as_tuple()
            if len(digits) > _DIGITS or abs(int(exponent)) > _PLACES:
                raise SchemaError(f"{name}={one}: numbers have {_DIGITS} digits, and {_PLACES} decimal places")


def _read_numbers(node: dict[str, Any]) -> None:
    """Rewrite bounds as closed ones that are read exactly, and check the multiple."""
    if _is_number(node.get("multipleOf")):
        _check_multiple(node["multipleOf"])
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    lowest = _lowest_whole if "integer" in kinds and "number" not in kinds else _lowest
    for closed, open_, sign in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        ends = [(name, node[name]) for name in (closed, open_) if node.get(name) is not None]
        if isinstance(node.get(open_), bool):  # of draft 4
            ends = [(open_ if node[open_] else closed, one) for name, one in ends if name == closed]
        if not ends or not all(_is_number(one) for _, one in ends):
            continue
        # times the sign both are lowest values
        low, is_open = max((sign * Decimal(repr(one)), name == open_) for name, one in ends)
        found = lowest(low, is_open=is_open)
        if abs(found) > _EXACT and found != -_INT64:
            name, one = ends[0]
            raise SchemaError(f"{name}={one}: bounds go to 2^53")
        node.pop(open_, None)
        found *= sign
        node[closed] = int(found) if found == int(found) else float(found)


def _lowest_whole(low: Decimal, *, is_open: bool) -> Decimal:
    """Lowest whole number of a range that begins at a value, at least -2^63 + 1024."""
    found = low.to_integral_value(ROUND_CEILING)
    found += 1 if is_open and found == low else 0
    return max(found, Decimal(-_INT64))


def _lowest(low: Decimal, *, is_open: bool) -> Decimal:
    """Lowest number of a range that begins at a value, with as many digits as are read exactly.

    Behind an open end it is the next such one: decimals between both are read as the end itself by programs with FP64.
    """
    places = low.adjusted() + 1 - _DIGITS if low else -_PLACES
    step = Decimal(1).scaleb(min(max(places, -_PLACES), 0))
    found = low.quantize(step, ROUND_CEILING, Context(prec=400))
    return found + step if is_open and found <= low else found


def _check_multiple(value: float) -> None:
    """Raise SchemaError unless the compiler reads a multiple exactly, and need not work long for it."""
    exact = Decimal(repr(value))
    whole = exact.scaleb(max(-int(exact.normalize().as_tuple().exponent), 0))
    if not 0 < whole <= MOST_MULTIPLE:
        raise SchemaError(
            f"multipleOf={value}: must be above 0 and, without its decimal point, at most {MOST_MULTIPLE}"
        )
    coefficient, places = value, 0
    while coefficient % 1:  # as the compiler does
        coefficient, places = coefficient * 10, places + 1
    if Decimal(int(coefficient)).scaleb(-places) != exact:
        raise SchemaError(f"multipleOf={value}: is not read exactly; use one of other digits")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
