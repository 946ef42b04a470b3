"""Guides of an answer in OpenAI's, vLLM's and other servers' fields: a JSON schema, a list, a regular expression, a
grammar."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from expertmesh.config.base import FieldError, parse_json
from expertmesh.config.sampling import SamplingParams
from expertmesh.serve.faults import RequestError
from expertmesh.serve.schema import HARMLESS

_OBJECT = {"type": "object"}
_OF_FORMAT = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("schema", "json_schema"),
    "json": ("value", "schema"),
    "regex": ("pattern", "regex", "value"),
    "grammar": ("grammar",),
}
"""Fields of `response_format` by its type, one of which says more: OpenAI's, llama.cpp's, TGI's, Together's and
Fireworks'."""
_OF_SCHEMA = ("name", "description", "strict", "schema")
_OF_OUTPUTS = ("json", "json_object", "choice", "regex", "grammar", "disable_fallback")
_NAMED = {
    "guided_json": "json_schema",
    "guided_choice": "choice",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "choice": "choice",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""Fields that are an option by themselves: vLLM's, ours, SGLang's and llama.cpp's."""
GUIDE_FIELDS = ("response_format", "structured_outputs", *_NAMED)
"""Fields that say what the whole answer is."""


class Guide(NamedTuple):
    """Rule for the whole answer."""

    field: str  # the field that says it
    option: str  # the option of `SamplingParams`
    value: Any


def guide_of(fields: Mapping[str, Any]) -> Guide | None:
    """Guide of a request; None: free text.

    Args:
        fields: fields of the request. `response_format` is {"type": "text"}, {"type": "json_object"} with or without a
            "schema", {"type": "json_schema", "json_schema": {"schema": ...}}, {"type": "regex", "pattern": ...} or
            {"type": "grammar", "grammar": ...}; `structured_outputs` has one of json, json_object, choice, regex and
            grammar; `guided_json` is a schema or its text, and so on.
    """
    found = [
        guide
        for name in GUIDE_FIELDS
        if fields.get(name) is not None and fields[name] not in HARMLESS.get(name, ())
        if (guide := _read(name, fields[name])) is not None
    ]
    if len(found) > 1:
        raise _wrong(found[-1].field, f"is given beside {found[0].field}; leave one out")
    return found[0] if found else None


def _read(name: str, value: Any) -> Guide | None:
    if name in _NAMED:
        return _guide(name, _NAMED[name], value)
    return _of_format(value) if name == "response_format" else _of_outputs(value)


def _of_format(value: Any) -> Guide | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _OF_FORMAT:
        raise _wrong(name, f"must be an object with type {_listed(_OF_FORMAT, 'or')}")
    names = _OF_FORMAT[kind]
    given = _known(name, value, ("type", *names))
    said = [one for one in names if one in given]
    if len(said) > 1:
        raise _wrong(name, f"{said[0]} is given beside {said[1]}; leave one out")
    content = given[said[0]] if said else None
    if said == ["json_schema"]:
        if not isinstance(content, dict):
            raise _wrong(name, "json_schema must be an object with a schema")
        content = _known(f"{name}.json_schema", content, _OF_SCHEMA).get("schema")
    if kind == "text":
        return None
    if kind == "json_object" and content is None:
        content = _OBJECT
    return _guide(name, kind if kind in ("regex", "grammar") else "json_schema", content)


def _of_outputs(value: Any) -> Guide | None:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise _wrong(name, f"must be an object with {_listed(_OF_OUTPUTS[:-1], 'or')}")
    given = _known(name, value, _OF_OUTPUTS)
    given.pop("disable_fallback", None)
    if not isinstance(given.get("json_object", False), bool):
        raise _wrong(name, "json_object must be true or false")
    if not given.get("json_object", True):
        del given["json_object"]
    if len(given) > 1:
        first, second = list(given)[:2]
        raise _wrong(name, f"{first} is given beside {second}; leave one out")
    for one, content in given.items():
        option = "json_schema" if one in ("json", "json_object") else one
        return _guide(name, option, _OBJECT if one == "json_object" else content)
    return None


def _guide(name: str, option: str, value: Any) -> Guide:
    """A guide whose value follows the rules of its option."""
    if option == "json_schema":
        return Guide(name, option, _schema(name, value))
    given: Any = {option: "" if value is None else value}
    try:
        return Guide(name, option, getattr(SamplingParams(**given), option))
    except FieldError as error:
        raise _wrong(name, str(error).removeprefix(f"{name}: ")) from None


def _known(place: str, value: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Fields that are set; raises RequestError if one is unknown and its value says something."""
    given = {name: one for name, one in value.items() if one is not None}
    for name, one in given.items():
        if name not in names and one is not False:
            raise _wrong(place, f"{str(name)[:60]} is not supported there; it has {_listed(names, 'and')}")
    return {name: one for name, one in given.items() if name in names}


def _schema(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except (ValueError, RecursionError):
            raise _wrong(name, "its schema is no JSON") from None
    if isinstance(value, bool):
        raise _wrong(name, "its schema must be an object; {} allows all JSON")
    if not isinstance(value, dict):
        raise _wrong(name, "its schema must be an object")
    return value


def _listed(names: Iterable[str], word: str) -> str:
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last


def _wrong(place: str, rule: str) -> RequestError:
    return RequestError(400, f"{place}: {rule}", param=place.partition(".")[0])
