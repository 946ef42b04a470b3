"""Answers that must be calls of tools: their grammar for llguidance, in the syntax in which the model writes calls."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from expertmesh.engine.grammar_trial import OPTIONS
from expertmesh.text.answer_formats import AnswerReading
from expertmesh.text.answer_pieces import CallArguments, CallStart, Content


class GuidedCalls(dict[str, Any]):
    """Calls that an answer must consist of, or JSON that it may be instead. As a mapping: JSON schema of the list of
    its calls, or of either.

    Args:
        reading: what parses the answers; its calls have a markup, and it has a tool.
        answer: JSON schema of an answer without calls; None: there must be calls.
    """

    def __init__(self, reading: AnswerReading, answer: Mapping[str, Any] | None = None) -> None:
        self.reading, self.answer = reading, None if answer is None else dict(answer)
        place = "#" if answer is None else "#/anyOf/0"
        forms = [
            _call_schema(name, one, f"{place}/items/anyOf/{i}/properties/arguments")
            for i, (name, one) in enumerate(reading.tools.items())
        ]
        calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": forms}}
        if reading.most is not None:
            calls["maxItems"] = reading.most
        super().__init__(calls if answer is None else {"anyOf": [calls, _moved(answer, "#/anyOf/1")]})

    @property
    def key(self) -> str:
        """Key that differs from calls of equal tools in another syntax."""
        given = self.reading
        names = [None if one is None else one.names[0] for one in (given.thoughts, given.calls)]
        return json.dumps([*names, given.most, given.is_open])

    def listed(self, text: str) -> str:
        """JSON text of the list of calls in an answer; of one without calls its content."""
        parser = self.reading()
        found: list[str] = []
        content = ""
        for piece in (*parser.feed(text), *parser.finish()):
            if isinstance(piece, CallStart):
                found.append(f'{{"name": {json.dumps(piece.name)}, "arguments": ')
            elif isinstance(piece, CallArguments):
                found[-1] += f"{piece.text}}}"
            elif isinstance(piece, Content):
                content += piece.text
        return f"[{', '.join(found)}]" if found or self.answer is None else content

    def grammar(self, read: Callable[[Mapping[str, Any]], Any], specials: Mapping[str, int]) -> str:
        """Lark grammar of an answer."""
        given = self.reading
        syntax, most, is_open = given.call_syntax, given.most, given.is_open
        assert syntax is not None and syntax.markup is not None
        markup = syntax.markup
        rules, names = [], []
        for i, (name, parameters) in enumerate(given.tools.items()):
            schema = _json(read(parameters))
            opens = markup.opens.format(name=name)
            closes = _written(markup.closes, specials)
            rules.append(f"call_{i}: {_written(opens, specials)} args_{i} {closes}")
            rules.append(f"args_{i}: {schema}")
            names.append(f"call_{i}")
        more = ""
        if markup.between is not None and most != 1:
            more = f"({_written(markup.between, specials)} call)*"
        before, after = (_written(one, specials) for one in (markup.before, markup.after))
        rules.append(f"calls: {before} call {more} {after}")
        start = "start: calls"
        if self.answer is not None:
            start = "start: (calls | answer)"
            rules.append(f"answer: {_json(read(self.answer))}")
        if given.thought_syntax is not None:
            opens, closes = given.thought_syntax.span
            start = start.replace("start:", "start: thought" if is_open else "start: [thought]")
            first = "" if is_open else _written(opens, specials)
            rules.append(f"thought: {first} {_until(closes, specials)} /[ \\n]{{0,4}}/")
            rules.append(f"thought_end[suffix={json.dumps(closes)}]: /(?s:.*)/")
        return "\n".join([start, f"call: {' | '.join(names)}", *rules])


def _json(schema: Any) -> str:
    """JSON of a schema in a Lark grammar."""
    return f"%json {json.dumps(schema | {'x-guidance': OPTIONS})}"


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
