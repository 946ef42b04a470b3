"""JSON schema requested for an answer, in OpenAI's or vLLM's fields."""

from collections.abc import Mapping
from typing import Any

from expertmesh.config.base import parse_json
from expertmesh.serve.faults import RequestError

_OBJECT = {"type": "object"}


def json_schema(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Name of the field that requests JSON, and the schema of the answer; None: free text.

    Args:
        fields: fields of the request. `response_format` is {"type": "text"}, {"type": "json_object"}, or {"type":
            "json_schema", "json_schema": {"schema": ...}}; `guided_json` is a schema or its text; `structured_outputs`
            is {"json": ...} with a schema or its text, or {"json_object": true}.

    Raises:
        RequestError: a field has another form, or more than one is given.
    """
    found = {}
    for name, read in _READERS.items():
        if fields.get(name) is not None:
            schema = read(fields[name])
            if schema is not None:
                found[name] = schema
    if len(found) > 1:
        name = list(found)[-1]
        raise _wrong(name, f"is given beside {next(iter(found))}; leave one out")
    return next(iter(found.items()), None)


def _of_format(value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _OBJECT
    if kind != "json_schema":
        rule = "must be an object with type text, json_object or json_schema"
        raise _wrong("response_format", rule)
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise _wrong("response_format", "json_schema must be an object with a schema")
    return _schema("response_format", inner.get("schema"))


def _of_outputs(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        raise _wrong("structured_outputs", "must be an object with json or json_object")
    given = {name for name, one in value.items() if one is not None and one is not False}
    if not given:
        return None
    if given == {"json_object"}:
        return _OBJECT
    if given != {"json"}:
        raise _wrong("structured_outputs", "only json or json_object is supported")
    return _schema("structured_outputs", value["json"])


def _schema(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except (ValueError, RecursionError):
            raise _wrong(name, "its schema is no JSON") from None
    if not isinstance(value, dict):
        raise _wrong(name, "its schema must be an object")
    return value


def _of_guided(value: Any) -> dict[str, Any]:
    return _schema("guided_json", value)


_READERS = {
    "response_format": _of_format,
    "structured_outputs": _of_outputs,
    "guided_json": _of_guided,
}


def _wrong(name: str, rule: str) -> RequestError:
    return RequestError(400, f"{name}: {rule}", param=name)
