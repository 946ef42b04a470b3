"""Syntaxes in which models write calls of tools: how a block of calls begins and ends, and what its text says.

Arguments in JSON are given as the model wrote them. Arguments between tags (Qwen3-Coder, GLM, MiniMax) are texts, which
become JSON values by the types in the tool's parameters.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from expertmesh.config.base import parse_json

Tools = Mapping[str, Mapping[str, Any]]
"""Parameters (JSON schemas) of the tools that may be called, by name."""


class ReadCall(NamedTuple):
    """A call as a model wrote it."""

    name: str  # name of the function
    arguments: str  # JSON text of an object
    call_id: str | None = None  # id that the model gave it; None: none


class MalformedCallError(ValueError):
    """A text is no block of calls.

    Args:
        is_cut: whether it ends within a value, of which the marker that ended it may be a part.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        super().__init__("no block of calls")
        self.is_cut = is_cut


class CallMarkup(NamedTuple):
    """Text around calls, in which `{name}` stands for a function's name."""

    opens: str  # text between the beginning of a call and its arguments
    closes: str = ""  # text behind the arguments
    before: str = ""  # text before the first call
    between: str | None = ""  # text between calls; None: there is one call only
    after: str = ""  # text behind the last call


class CallSyntax(NamedTuple):
    """A syntax of calls."""

    begin: str  # marker before a block of calls; "": a block is a whole answer
    end: str | None  # marker behind it; None: the block is the rest of the answer
    read: Callable[[str, Tools], list[ReadCall]]  # calls in the text between the markers; raises MalformedCallError
    # beginnings of that text; an answer where none of them follows has no block there; empty: any
    first: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()  # further markers, which may be special tokens
    # text around calls for guided decoding; None: calls that must be are written as `JSON_CALLS`
    markup: CallMarkup | None = None

    @property
    def all_markers(self) -> tuple[str, ...]:
        """All markers, which may be special tokens."""
        return (self.begin, self.end or "", *self.markers)


_BLANK = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(parse_constant=lambda _: _no_constant())


def _no_constant() -> Any:
    raise ValueError("no JSON")


def _value(text: str, at: int) -> tuple[Any, int]:
    """JSON value at a place, and the place behind it."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string")
        raise MalformedCallError(is_cut=is_cut) from None
    except (ValueError, RecursionError):  # NaN, a number of too many digits, too many brackets
        raise MalformedCallError from None
    return value, end


def _skip(text: str, at: int, also: str = "") -> int:
    """Place of the next character that is no blank and none of some others."""
    while True:
        found = _BLANK.match(text, at)
        at = found.end() if found else at
        if not (at < len(text) and text[at] in also):
            return at
        at += 1


def _object(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Values of a JSON object at a place, each with its text, and the place behind the object."""
    found: dict[str, tuple[Any, str]] = {}
    at = _skip(text, _expect(text, at, "{"))
    while not text.startswith("}", at):
        name, end = _value(text, at)
        if not isinstance(name, str):
            raise MalformedCallError
        start = _skip(text, _expect(text, _skip(text, end), ":"))
        value, end = _value(text, start)
        found[name] = value, text[start:end]
        at = _skip(text, end)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith("}", at):
            raise MalformedCallError
    return found, at + 1


def _expect(text: str, at: int, mark: str) -> int:
    if not text.startswith(mark, at):
        raise MalformedCallError
    return at + len(mark)


def _arguments(text: str, at: int) -> tuple[str, int]:
    """Text of a JSON object at a place, and the place behind it."""
    value, end = _value(text, at)
    if not isinstance(value, dict):
        raise MalformedCallError
    return text[at:end], end


_NAMES, _ARGUMENTS = ("name", "function", "tool_name"), ("arguments", "parameters")
_IDS = ("id", "tool_call_id")


def _call(text: str, at: int) -> tuple[ReadCall, int]:
    """Call in a JSON object with a name and arguments."""
    values, end = _object(text, at)
    name = next((values[key][0] for key in _NAMES if key in values), None)
    value, given = next((values[key] for key in _ARGUMENTS if key in values), ({}, "{}"))
    if isinstance(value, str):  # JSON within JSON
        value, given = _value(value, 0)[0], value
    if not isinstance(name, str) or not isinstance(value, dict):
        raise MalformedCallError
    call_id = next((values[key][0] for key in _IDS if key in values), None)
    return ReadCall(name, given, call_id if isinstance(call_id, str) else None), end


def read_json(text: str, tools: Tools) -> list[ReadCall]:
    """Calls in JSON: an object, several with blanks, commas or semicolons between, or a list."""
    at = _skip(text, 0)
    if not text.startswith("[", at):
        return _objects(text, at)
    found: list[ReadCall] = []
    at = _skip(text, at + 1)
    while not text.startswith("]", at):
        one, end = _call(text, at)
        found.append(one)
        at = _skip(text, end)
        if not text.startswith("]", at):
            at = _skip(text, _expect(text, at, ","))
    if not found or _skip(text, at + 1) < len(text):
        raise MalformedCallError
    return found


def _objects(text: str, at: int) -> list[ReadCall]:
    found: list[ReadCall] = []
    while at < len(text) or not found:
        one, end = _call(text, at)
        found.append(one)
        at = _skip(text, end, ",;")
    return found


class _JsonNames(ast.NodeTransformer):
    """Names of JSON's constants, which some models write in Python's calls."""

    _VALUES = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """The constant, or the name."""
        known = node.id in self._VALUES
        return ast.Constant(self._VALUES[node.id]) if known else node


def read_python(text: str, tools: Tools) -> list[ReadCall]:
    """Calls in a list as Python writes it, `[f(a=1), g()]`; their arguments are literals, which nothing runs."""
    bare = text.strip().removesuffix(_PYTHON_END).strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # an unknown escape stays text
            parsed = _JsonNames().visit(ast.parse(bare, mode="eval")).body
        calls = parsed.elts if isinstance(parsed, ast.List) else []
        found = [_python_call(one) for one in calls]
    except SyntaxError as error:
        raise MalformedCallError(is_cut="unterminated" in error.msg) from None
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError from None
    if not found:
        raise MalformedCallError
    return found


def _python_call(node: ast.AST) -> ReadCall:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedCallError
    if any(one.arg is None for one in node.keywords):  # f(**a)
        raise MalformedCallError
    values = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    return ReadCall(ast.unparse(node.func), _json_text(values))


def _json_text(value: Any) -> str:
    """JSON text of a literal of Python; raises ValueError or TypeError where there is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # half a character is no text
    return text


_PYTHON_END = "<|python_end|>"
_MISTRAL = re.compile(r"\s*(\[TOOL_CALLS\])?([^\[\]{}\s]+)(?:\[CALL_ID\](\w+))?\[ARGS\]\s*")


def _read_mistral(text: str, tools: Tools) -> list[ReadCall]:
    """Calls of Mistral's models: a list in JSON, or from the 11th version of its tokenizers name[ARGS]{...}."""
    if "[ARGS]" not in text:
        return read_json(text, tools)
    found: list[ReadCall] = []
    at = 0
    while at < len(text):
        head = _MISTRAL.match(text, at)
        if head is None or (head[1] is None) != (not found):
            raise MalformedCallError
        arguments, end = _arguments(text, head.end())
        found.append(ReadCall(head[2], arguments, head[3]))
        at = _skip(text, end)
    return found


def _read_each(head: re.Pattern[str], close: re.Pattern[str]) -> Callable[..., list[ReadCall]]:
    """Reader of calls that are a head (groups `name`, `id`), arguments in JSON, and what closes each."""

    def read(text: str, tools: Tools) -> list[ReadCall]:
        found: list[ReadCall] = []
        at = _skip(text, 0)
        while at < len(text) or not found:
            begun = head.match(text, at)
            if begun is None:
                raise MalformedCallError
            arguments, end = _arguments(text, begun.end())
            closed = close.match(text, end)
            if closed is None:
                raise MalformedCallError
            call_id = begun["id"] if "id" in head.groupindex else None
            found.append(ReadCall(begun["name"], arguments, call_id))
            at = closed.end()
        return found

    return read


class _Tags(NamedTuple):
    """Tags of calls whose arguments are texts."""

    head: re.Pattern[str]  # what a call begins with, with a group `name`
    # what an argument begins with, with a group `key`, and `string` ("true" or "false") where it tells that
    opens: re.Pattern[str]
    closes: str  # what ends its value
    tail: re.Pattern[str]  # what ends the call
    is_lined: bool = False  # whether a line break around a value is none of it

    def read(self, text: str, tools: Tools) -> list[ReadCall]:
        """Calls in a text."""
        found: list[ReadCall] = []
        at = _skip(text, 0)
        while at < len(text) or not found:
            head = self.head.match(text, at)
            if head is None:
                raise MalformedCallError
            kinds, at, values = _kinds(tools.get(head["name"], {})), head.end(), {}
            while (begun := self.opens.match(text, at)) is not None:
                end = text.find(self.closes, begun.end())
                if end < 0:
                    raise MalformedCallError(is_cut=True)
                value = text[begun.end() : end]
                if self.is_lined:
                    value = value.removeprefix("\n").removesuffix("\n")
                kind = _TOLD.get(begun.groupdict().get("string") or "") or kinds.get(begun["key"])
                values[begun["key"]] = _typed(value, kind)
                at = end + len(self.closes)
            tail = self.tail.match(text, at)
            if tail is None:
                raise MalformedCallError
            at = tail.end()
            members = (f"{json.dumps(k, ensure_ascii=False)}: {one}" for k, one in values.items())
            found.append(ReadCall(head["name"], "{" + ", ".join(members) + "}"))
        return found


_PYTHONS = ("True", "False", "None", "[", "{")
"""Beginnings of values that some templates write as Python does, not as JSON."""
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
_KINDS |= {list: "array", type(None): "null"}
_TOLD = {"true": {"string"}, "false": {*_KINDS.values()} - {"string"}}


def _kinds(parameters: Mapping[str, Any]) -> dict[str, set[str]]:
    """Types of each parameter, as far as its schema names them."""
    known = parameters.get("properties")
    if not isinstance(known, Mapping):
        return {}
    return {name: set(_types(one)) for name, one in known.items()}


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from (kind,) if isinstance(kind, str) else kind if isinstance(kind, list) else ()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else []:
        yield _KINDS.get(type(value), "string")
    for form in ("anyOf", "oneOf"):
        for one in schema.get(form) or ():
            yield from _types(one)


def _typed(text: str, kinds: set[str] | None) -> str:
    """JSON text of a value that is written as text: JSON where its type allows that, else a string."""
    is_python = (kinds is None or "string" not in kinds) and text.lstrip().startswith(_PYTHONS)
    try:
        given = _json_of_python(text) if is_python else text
        value = parse_json(given.encode())
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _KINDS.get(type(value), "string")
    if not kinds:
        is_meant = kind != "string"
    elif "string" in kinds:
        is_meant = kind in kinds - {"string"} and kind in ("null", "object", "array")
    else:
        is_meant = True
    return given.strip() if is_meant else json.dumps(text, ensure_ascii=False)


def _json_of_python(text: str) -> str:
    """JSON text of a literal of Python; a text that is none stays as it is."""
    try:
        parse_json(text.encode())
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings(action="ignore"):
                return _json_text(ast.literal_eval(text.strip()))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            pass
    return text


_QWEN3_CODER = _Tags(
    re.compile(r"\s*<function=(?P<name>[^>\n]+)>\s*"),
    re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>"),
    "</parameter>",
    re.compile(r"\s*</function>\s*"),
    is_lined=True,
)
_GLM = _Tags(
    re.compile(r"\s*(?P<name>[^<\s]+)\s*"),
    re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"\s*\Z"),
)
_MINIMAX = _Tags(
    re.compile(r"\s*<invoke name=\"?(?P<name>[^\">\n]+)\"?>\s*"),
    re.compile(r"\s*<parameter name=\"?(?P<key>[^\">\n]+)\"?>"),
    "</parameter>",
    re.compile(r"\s*</invoke>\s*"),
)
_DSML = _Tags(
    re.compile(r"\s*<｜DSML｜invoke name=\"(?P<name>[^\"\n]+)\">\s*"),
    re.compile(r"\s*<｜DSML｜parameter name=\"(?P<key>[^\"\n]+)\"(?: string=\"(?P<string>true|false)\")?>"),
    "</｜DSML｜parameter>",
    re.compile(r"\s*</｜DSML｜invoke>\s*"),
)
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_MARKERS = (_CALL_BEGIN, _CALL_END, _SEP)

_JSON_LIST = CallMarkup('{{"name": "{name}", "arguments": ', "}", "[", ", ", "]")

JSON_CALLS = CallSyntax("", None, read_json, ("[", "{"), markup=_JSON_LIST)
"""A JSON list of calls, for models whose format has no markup of its own."""
HERMES = CallSyntax(
    "<tool_call>",
    "</tool_call>",
    read_json,
    ("{", "["),
    markup=CallMarkup('<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"),
)
TOOL_CALLS, TOOLCALL, INTERNLM, COHERE = (
    CallSyntax(begin, end, read_json, ("{", "["))
    for begin, end in (
        ("<tool_calls>", "</tool_calls>"),
        ("<TOOLCALL>", "</TOOLCALL>"),
        ("<|action_start|><|plugin|>", "<|action_end|>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    )
)
PYTHONIC = CallSyntax("<|python_start|>", None, read_python, ("[",), (_PYTHON_END,))
LFM2 = CallSyntax("<|tool_call_start|>", "<|tool_call_end|>", read_python, ("[",))
QWEN3_CODER = CallSyntax("<tool_call>", "</tool_call>", _QWEN3_CODER.read, ("<function=",))
SEED = QWEN3_CODER._replace(begin="<seed:tool_call>", end="</seed:tool_call>")
GLM = CallSyntax("<tool_call>", "</tool_call>", _GLM.read)
MINIMAX = CallSyntax("<minimax:tool_call>", "</minimax:tool_call>", _MINIMAX.read, ("<invoke name=",))
DEEPSEEK_V32, DEEPSEEK_V4 = (
    CallSyntax(f"<｜DSML｜{name}>", f"</｜DSML｜{name}>", _DSML.read, ("<｜DSML｜invoke",), ("｜DSML｜",))
    for name in ("function_calls", "tool_calls")
)
DEEPSEEK_V3 = CallSyntax(
    _CALLS_BEGIN,
    _CALLS_END,
    _read_each(
        re.compile(rf"\s*{_CALL_BEGIN}\w*{_SEP}(?P<name>[^\n`]+)\n```(?:json)?\s*"),
        re.compile(rf"\s*```\s*{_CALL_END}\s*"),
    ),
    (_CALL_BEGIN,),
    _DEEPSEEK_MARKERS,
    CallMarkup(
        f"{_CALL_BEGIN}function{_SEP}{{name}}\n```json\n",
        f"\n```{_CALL_END}",
        _CALLS_BEGIN,
        "\n",
        _CALLS_END,
    ),
)
DEEPSEEK_V31 = CallSyntax(
    _CALLS_BEGIN,
    _CALLS_END,
    _read_each(
        re.compile(rf"\s*{_CALL_BEGIN}(?P<name>[^<{{]+){_SEP}\s*"),
        re.compile(rf"\s*{_CALL_END}\s*"),
    ),
    (_CALL_BEGIN,),
    _DEEPSEEK_MARKERS,
    CallMarkup(f"{_CALL_BEGIN}{{name}}{_SEP}", _CALL_END, _CALLS_BEGIN, "", _CALLS_END),
)
KIMI = CallSyntax(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    _read_each(
        re.compile(
            r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^<:]+):\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*"
        ),
        re.compile(r"\s*<\|tool_call_end\|>\s*"),
    ),
    ("<|tool_call_begin|>",),
    ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    CallMarkup(
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        None,
        "<|tool_calls_section_end|>",
    ),
)
MISTRAL = CallSyntax("[TOOL_CALLS]", None, _read_mistral, markup=_JSON_LIST._replace(before="[TOOL_CALLS]["))
MISTRAL_V11 = MISTRAL._replace(markers=("[ARGS]", "[CALL_ID]"), markup=CallMarkup("[TOOL_CALLS]{name}[ARGS]"))
LLAMA = CallSyntax(
    "<|python_tag|>",
    None,
    read_json,
    ("{",),
    markup=CallMarkup('{{"name": "{name}", "parameters": ', "}", between=None),
)
GRANITE = JSON_CALLS._replace(begin="<|tool_call|>", markup=_JSON_LIST._replace(before="<|tool_call|>["))
HARMONY_CALLS = CallSyntax(
    "<|channel|>",
    "<|call|>",
    _read_each(
        re.compile(
            r"\s*(?:\w+\s+)?to=functions\.(?P<name>[^\s<]+)[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>\s*"
        ),
        re.compile(r"\s*\Z"),
    ),
    markers=("<|message|>", "<|constrain|>", "<|start|>"),
    markup=CallMarkup(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        between=None,
    ),
)
