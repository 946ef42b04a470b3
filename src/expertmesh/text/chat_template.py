"""Chat templates of the hub: Jinja in jinja2's immutable sandbox, with the few functions that templates expect.

A template is an untrusted program. It gets the messages and nothing else: no clock, no attributes that begin with an
underscore, no classes. Templates that ask for the date use their own default, or `DATE` if they have none (gpt-oss), so that
tokens do not depend on the day.
"""

import json
import re
from datetime import datetime
from importlib.metadata import version
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from expertmesh.errors import ConfigError

DATE = datetime(2025, 1, 1)
"""Date for templates that write today's date and have no default."""
_HAS_DEFAULT = re.compile(r"strftime_now\s+is\s+(not\s+)?defined")
_FIRST_SAFE = (3, 1, 6)
"""Oldest accepted release of jinja2; older ones have known escapes from the sandbox."""


def compiled(source: str) -> Any:
    """Compiled jinja2 template of a source.

    Raises:
        ConfigError: the source is not valid Jinja, or jinja2 is too old.
    """
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < _FIRST_SAFE:
        raise ConfigError(
            f"jinja2={version('jinja2')}: chat templates need 3.1.6, whose sandbox is closed; pip install -U jinja2"
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {
        "range": environment.globals["range"],
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _PlainNamespace,
        "raise_exception": _refuse,
    }
    if not _HAS_DEFAULT.search(source):
        environment.globals["strftime_now"] = DATE.strftime
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is no Jinja ({error}); use the model's own") from None
    except (RecursionError, MemoryError, SyntaxError):
        raise ConfigError(
            "the chat template is nested deeper than Python allows; use the model's own"
        ) from None


class _Generation(Extension):
    """Tag {% generation %} ... {% endgeneration %} around answers, which renders its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes inside the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


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


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
