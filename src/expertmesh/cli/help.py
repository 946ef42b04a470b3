"""Help of a verb, from the docstring and the fields of its `Operation`; imports no torch."""

import inspect
import re
import typing
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.options import Option, entry_kind, options_of

_HEAD = 26
"""Columns of the names of options."""


def name_of(kind: type[BaseModel]) -> str:
    """Name of a verb: `BenchServeVerb` is "bench serve"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Verb")).lower()


def help_of(
    kind: type[BaseModel], options: Mapping[str, Option] | None = None, *, more: str = ""
) -> str:
    """Text of `expertmesh VERB --help`, wrapped to the terminal.

    Args:
        kind: the verb.
        options: all of its options; None: options of its fields.
        more: text between the words and the options.
    """
    options = options_of(kind) if options is None else options
    about, _, examples = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    words = [option for option in options.values() if option.spelling.is_word]
    needed = [o for o in options.values() if o.field.is_required() and not o.spelling.is_word]
    usage = [
        f"usage: expertmesh {name_of(kind)}",
        *map(_word, words),
        *(f"{option.flag} {usage_words(option)}" for option in needed),
        "[options]",
    ]
    parts = [" ".join(usage), " ".join(about.split())]
    if words:
        parts.append("\n".join(_row(usage_words(o), o, is_word=True) for o in words))
    parts += [more] if more else []
    parts += [
        "\n".join([f"{title}:", *(_row(_flag(one), one) for one in group)])
        for title, group in _groups(options.values())
    ]
    return fitted("\n\n".join([*parts, *[examples] * bool(examples)]))


def _groups(options: Iterable[Option]) -> Iterable[tuple[str, list[Option]]]:
    """Titles and options; a section with a name on the command line has its docstring as title."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        if option.spelling.is_word:
            continue
        section = option.spelled.rpartition(".")[0]
        about = (option.section.__doc__ or "").strip().partition("\n")[0]
        title = f"{about.rstrip('.')} (--{section})" if section else "options"
        groups.setdefault(title, []).append(option)
    return groups.items()


def usage_words(option: Option) -> str:
    """Placeholder of an option's value."""
    if option.spelling.metavar:
        return option.spelling.metavar
    kind = entry_kind(option)
    if typing.get_origin(kind) is typing.Literal:
        choices = list(map(str, dict.fromkeys(typing.get_args(kind))))
        return "|".join(choices) if option.spelling.is_word else f"{{{','.join(choices)}}}"
    names = {bool: "BOOL", int: "N", float: "X", dict: "JSON"}
    return names.get(kind, "TEXT") if isinstance(kind, type) else "TEXT"


def _word(option: Option) -> str:
    text = usage_words(option) + " ..." * option.is_list
    return text if option.field.is_required() else f"[{text}]"


def _flag(option: Option) -> str:
    if option.is_bool and option.field.default is not True:
        return option.flag
    several = " ..." if option.is_list and not option.is_each else ""
    return f"{option.flag} {usage_words(option)}{several}"


def _row(head: str, option: Option, *, is_word: bool = False) -> str:
    """Name and text of an option, the text below a long name."""
    text = " ".join((option.field.description or "").partition("\n\n")[0].split()).removesuffix(".")
    first = text.partition(" ")[0]
    text = text if first[1:] != first[1:].lower() else text[:1].lower() + text[1:]
    value = _default(option.default)
    if is_word and option.spelling.also:
        text += f"; or {option.flag} {usage_words(option)}"
    if value and "default:" not in text:
        text += f" (default: {value})"
    if is_word or len(head) <= _HEAD:
        return f"  {head:<{_HEAD}}  {text}"
    return f"  {head}\n{' ' * (_HEAD + 4)}{text}"


def _default(value: object) -> str:
    """Default of an option as it is typed; "" where it is off, or stands for something else."""
    if value is None or value is False or value in ((), {}, ""):
        return ""
    several = isinstance(value, tuple | list)
    text = " ".join(map(str, value)) if several else str(value)  # type: ignore[call-overload]
    return text.lower() if value is True else text
