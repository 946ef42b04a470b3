"""Chat templates of the hub: Jinja in jinja2's immutable sandbox, with the functions that transformers gives to
templates.

A template is an untrusted program. It gets its variables and nothing else: no clock, no attributes that begin with an
underscore, no classes. Templates that ask for the date use their own default, or `DATE` if they have none (gpt-oss), so
that tokens do not depend on the day. `template_process` bounds its time and memory.
"""

import json
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from expertmesh.errors import ConfigError

DATE = datetime(2025, 1, 1)
"""Date for templates that write today's date and have no default."""
_HAS_DEFAULT = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
_FIRST_SAFE = (3, 1, 6)
"""Oldest accepted release of jinja2; older ones have known escapes from the sandbox."""
_TEMPLATES = 8
"""Compiled templates that are kept."""


class TooMuchWrittenError(Exception):
    """A template wrote more than it may."""


def rendered(
    source: str,  # the template
    variables: Mapping[str, Any],  # its variables, of plain types
    *,
    unset: Collection[str] | None = None,
    most_characters: int,  # characters that it may write
) -> str:
    """Text that a template writes.

    Args:
        unset: names of special tokens that are known to be nothing; the use of any other unknown token is refused.
            None: an unknown token is nothing.
    """
    template = _compiled(source, None if unset is None else frozenset(unset))
    pieces, size = [], 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > most_characters:
                raise TooMuchWrittenError
            pieces.append(piece)
    except (TemplateError, *_FAILURES) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(f"the model's chat template refuses it ({reason})") from None
    return "".join(pieces)


@lru_cache(_TEMPLATES)
def _compiled(source: str, unset: frozenset[str] | None) -> Any:
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < _FIRST_SAFE:
        raise ConfigError(
            f"jinja2={version('jinja2')}: chat templates need 3.1.6, whose sandbox is closed; pip install -U jinja2"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        undefined=Undefined if unset is None else _undefined(unset),
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {
        "range": environment.globals["range"],
        "dict": _PlainDict(),
        "namespace": _PlainNamespace,
        "raise_exception": _refuse,
    }
    if not _HAS_DEFAULT.search(source):
        environment.globals["strftime_now"] = DATE.strftime
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is no Jinja ({error}); use the model's own") from None
    except (RecursionError, SyntaxError):
        raise ConfigError("the chat template is nested deeper than Python allows; use the model's own") from None


def variables_of(source: str) -> frozenset[str]:
    """Names of the variables that a template reads; empty if it is no template."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        return frozenset(find_undeclared_variables(environment.parse(source)))
    except (TemplateSyntaxError, RecursionError):
        return frozenset()


def _undefined(unset: frozenset[str]) -> type[Undefined]:
    """Class of unknown variables: a special token whose value no file tells may only be asked whether it is defined."""

    class UnknownToken(StrictUndefined):
        """An unknown special token."""

        def __init__(self, name: str) -> None:
            told = f"no file of the tokenizer names {name}; name it in tokenizer_config.json, null if there is none"
            super().__init__(told, name=name)

    class Unknown(Undefined):
        """An unknown variable."""

        def __new__(cls, *args: Any, name: str | None = None, **more: Any) -> Any:
            is_variable = not args and "obj" not in more
            if is_variable and name and name.endswith("_token") and name not in unset:
                return UnknownToken(name)
            return super().__new__(cls)

    return Unknown


class _Generation(Extension):
    """Tag {% generation %} ... {% endgeneration %} around answers, which renders its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes inside the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainDict:
    """Python's dict without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args, **kwargs)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise TemplateError(f"a namespace may not have {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,  # and RecursionError
)
"""Exceptions that rendering a template may raise besides jinja2's own; a MemoryError ends the process."""
