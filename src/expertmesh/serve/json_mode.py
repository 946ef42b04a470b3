"""JSON schema requested for an answer, in OpenAI's, vLLM's or llama.cpp's fields."""

from collections.abc import Iterable, Mapping
from typing import Any

from expertmesh.config.base import parse_json
from expertmesh.serve.faults import RequestError

_OBJECT = {"type": "object"}
_OF_FORMAT = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "schema", "json_schema"),
}
"""Fields of `response_format` by its type."""
_OF_SCHEMA = ("name", "description", "strict", "schema")
_OF_OUTPUTS = ("json", "json_object", "disable_fallback")


def json_schema(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Name of the field that requests JSON, and the schema of the answer; None: free text.

    Args:
        fields: fields of the request. `response_format` is {"type": "text"}, {"type": "json_object"} with or without a
            "schema", or {"type": "json_schema", "json_schema": {"schema": ...}}; `guided_json` is a schema or its
            text; `structured_outputs` is {"json": ...} with a schema or its text, or {"json_object": true}.

    Raises:
        RequestError: a field has another form or an unknown field within, or more than one is given.
    """
    found = {}
    for name, read in JSON_FIELDS.items():
        if fields.get(name) is not None:
            schema = read(fields[name])
            if schema is not None:
                found[name] = schema
    if len(found) > 1:
        name = list(found)[-1]
        raise _wrong(name, f"is given beside {next(iter(found))}; leave one out")
    return next(iter(found.items()), None)


def _of_format(value: Any) -> dict[str, Any] | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _OF_FORMAT:
        raise _wrong(name, "must be an object with type text, json_object or json_schema")
    given = _known(name, value, _OF_FORMAT[kind])
    if "json_schema" in given:
        if "schema" in given:
            raise _wrong(name, "schema is given beside json_schema; leave one out")
        if not isinstance(given["json_schema"], dict):
            raise _wrong(name, "json_schema must be an object with a schema")
        given = _known(f"{name}.json_schema", given["json_schema"], _OF_SCHEMA)
    if kind == "json_object" and "schema" not in given:
        return _OBJECT
    return None if kind == "text" else _schema(name, given.get("schema"))


def _of_outputs(value: Any) -> dict[str, Any] | None:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise _wrong(name, "must be an object with json or json_object")
    given = _known(name, value, _OF_OUTPUTS)
    if given.get("json_object") not in (None, False, True):
        raise _wrong(name, "json_object must be true or false")
    if "json" in given and given.get("json_object"):
        raise _wrong(name, "json is given beside json_object; leave one out")
    if "json" in given:
        return _schema(name, given["json"])
    return _OBJECT if given.get("json_object") else None


def _of_guided(value: Any) -> dict[str, Any]:
    return _schema("guided_json", value)


def _known(place: str, value: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Fields that are set; raises RequestError if one is unknown and its value says something."""
    given = {name: one for name, one in value.items() if one is not None}
    for name, one in given.items():
        if name not in names and one is not False:
            known = ", ".join(names)
            raise _wrong(place, f"{str(name)[:60]} is not supported there; it has {known}")
    return given


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


JSON_FIELDS = {
    "response_format": _of_format,
    "structured_outputs": _of_outputs,
    "guided_json": _of_guided,
}
"""Fields that request JSON, and what reads each."""


def _wrong(place: str, rule: str) -> RequestError:
    return RequestError(400, f"{place}: {rule}", param=place.partition(".")[0])
