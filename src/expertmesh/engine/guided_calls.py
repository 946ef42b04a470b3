"""Answers that must be calls of tools: their grammar for llguidance, in the syntax in which the model writes calls."""

import json
from collections.abc import Mapping
from typing import Any

from expertmesh.engine.schema_trial import OPTIONS
from expertmesh.text.answer_formats import NONE, AnswerReading, format_of
from expertmesh.text.answer_pieces import CallArguments, CallStart
from expertmesh.text.call_syntax import Tools


class GuidedCalls(dict[str, Any]):
    """Calls that an answer must consist of. As a mapping: JSON schema of the list of its calls.

    Args:
        reading: what parses the answers; its calls have a markup, and it has a tool.
    """

    def __init__(self, reading: AnswerReading) -> None:
        self.reading = reading
        forms = [
            _call_schema(name, one, f"#/items/anyOf/{i}/properties/arguments")
            for i, (name, one) in enumerate(reading.tools.items())
        ]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": forms}}
        super().__init__(schema if reading.most is None else {**schema, "maxItems": reading.most})

    @property
    def _named(self) -> tuple[Any, ...]:
        """Arguments by names, which can be pickled."""
        given = self.reading
        thoughts, calls = (
            NONE if one is None else one.names[0] for one in (given.thoughts, given.calls)
        )
        return thoughts, calls, dict(given.tools), given.most, given.is_open

    @property
    def key(self) -> str:
        """Key that differs from calls of equal tools in another syntax."""
        thoughts, calls, _, most, is_open = self._named
        return json.dumps([thoughts, calls, most, is_open])

    def listed(self, text: str) -> str:
        """JSON text of the list of calls in an answer."""
        parser = self.reading()
        found: list[str] = []
        for piece in (*parser.feed(text), *parser.finish()):
            if isinstance(piece, CallStart):
                found.append(f'{{"name": {json.dumps(piece.name)}, "arguments": ')
            elif isinstance(piece, CallArguments):
                found[-1] += f"{piece.text}}}"
        return f"[{', '.join(found)}]"

    def grammar(self, schemas: Mapping[str, Any], specials: Mapping[str, int]) -> str:
        """Lark grammar of an answer.

        Args:
            schemas: parameters of each tool, as the compiler reads them.
            specials: ids of special tokens by name.
        """
        given = self.reading
        assert given.calls is not None and given.calls.calls is not None
        markup, most, is_open = given.calls.calls.markup, given.most, given.is_open
        assert markup is not None
        rules, names = [], []
        for i, name in enumerate(given.tools):
            schema = json.dumps(schemas[name] | {"x-guidance": OPTIONS})
            opens = markup.opens.format(name=name)
            closes = _written(markup.closes, specials)
            rules.append(f"call_{i}: {_written(opens, specials)} args_{i} {closes}")
            rules.append(f"args_{i}: %json {schema}")
            names.append(f"call_{i}")
        more = ""
        if markup.between is not None and most != 1:
            more = f"({_written(markup.between, specials)} call)*"
        before, after = (_written(one, specials) for one in (markup.before, markup.after))
        start = f"start: {before} call {more} {after}"
        if given.thoughts is not None and given.thoughts.thoughts is not None:
            opens, closes = given.thoughts.thoughts.span
            start = start.replace("start:", "start: thought" if is_open else "start: [thought]")
            first = "" if is_open else _written(opens, specials)
            rules.append(f"thought: {first} {_until(closes, specials)} /[ \\n]{{0,4}}/")
            rules.append(f"thought_end[suffix={json.dumps(closes)}]: /(?s:.*)/")
        return "\n".join([start, f"call: {' | '.join(names)}", *rules])

    def __reduce__(self) -> tuple[Any, ...]:
        """Arguments by names."""
        return _of_names, self._named


def _of_names(
    thoughts: str, calls: str, tools: Tools, most: int | None, is_open: bool
) -> GuidedCalls:
    found = format_of("thoughts", "", thoughts), format_of("calls", "", calls)
    return GuidedCalls(AnswerReading(*found, tools, most, is_open))


def _call_schema(name: str, parameters: Mapping[str, Any], place: str) -> dict[str, Any]:
    """JSON schema of a call, whose references within the parameters lead there."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": _moved(parameters, place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _moved(one, place) for name, one in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        found["$ref"] = place + target[1:]
    return found


def _written(text: str, specials: Mapping[str, int]) -> str:
    """A text in a Lark grammar, whose special tokens are tokens."""
    found = []
    while text:
        ends = [(at, name) for name in specials if (at := text.find(name)) >= 0]
        at, name = min(ends, default=(len(text), ""))
        if at:
            found.append(json.dumps(text[:at], ensure_ascii=False))
        if name:
            found.append(f"<[{specials[name]}]>")
        text = text[at + len(name) :]
    return " ".join(found)


def _until(mark: str, specials: Mapping[str, int]) -> str:
    """Any text up to a mark and with it, in a Lark grammar."""
    if any(name in mark for name in specials):  # which no text holds
        return f"/(?s:.*)/ {_written(mark, specials)}"
    return "thought_end"
