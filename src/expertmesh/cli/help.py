"""Help of a verb, from the docstring and the fields of its `Operation`; imports no torch."""

import inspect
import re
import typing
from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.options import Option, entry_kind, flag_name, options_of

_HEAD = 26
"""Columns of the names of options."""
_OTHER = re.compile(r"(?<![\w.\-=/(])[a-z]+(?:[._][a-z0-9]+)+(?![\w(])")
"""Name of a field in a text."""
_NONE = re.compile(r"; none: ([^;]*)$")
"""Meaning of none at the end of a text."""


def name_of(kind: type[BaseModel]) -> str:
    """Name of a verb: `BenchServeVerb` is "bench serve"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__.removesuffix("Verb")).lower()


def help_of(kind: type[BaseModel], options: Mapping[str, Option] | None = None, *, more: str = "") -> str:
    """Text of `expertmesh VERB --help`, wrapped to the terminal."""
    options = options_of(kind) if options is None else options
    about, _, examples = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    words = [option for option in options.values() if option.spelling.is_word]
    needed = [o for o in options.values() if o.field.is_required() and not o.spelling.is_word]
    usage = [
        f"usage: expertmesh {name_of(kind)}",
        *map(_word, words),
        *map(_flag, needed),
        "[options]",
    ]
    parts = [" ".join(usage), " ".join(about.split())]
    flags = _flags_by_name(options.values())
    if words:
        parts.append("\n".join(_row(usage_words(o), o, flags, is_word=True) for o in words))
    parts += [more] if more else []
    parts += [
        "\n".join([f"{title}:", *(_row(_flag(one), one, flags) for one in group)])
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
        title = f"{about.rstrip('.')} ({flag_name(section)})" if section else "options"
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
    if option.is_bool and option.default is False:
        return option.flag
    several = " ..." if option.is_list and not option.is_each else ""
    return f"{option.flag} {usage_words(option)}{several}"


def _flags_by_name(options: Iterable[Option]) -> dict[str, str]:
    """Flags by the names of their fields, with and without sections."""
    flags: dict[str, str] = {}
    for option in options:
        flags[option.name] = option.flag
        flags.setdefault(option.name.rpartition(".")[2], option.flag)
    return flags


def _row(head: str, option: Option, flags: Mapping[str, str], *, is_word: bool = False) -> str:
    """Name and text of an option, the text below a long name."""
    text = _text(option, flags)
    if is_word and option.spelling.also:
        text += f"; or {option.flag} {usage_words(option)}"
    if is_word or len(head) <= _HEAD:
        return f"  {head:<{_HEAD}}  {text}"
    return f"  {head}\n{' ' * (_HEAD + 4)}{text}"


def _text(option: Option, flags: Mapping[str, str]) -> str:
    """Text of an option as one line: other options as they are typed, and the default at its end."""
    text = " ".join((option.field.description or "").partition("\n\n")[0].split()).removesuffix(".")
    first = text.partition(" ")[0]
    text = text if first[1:] != first[1:].lower() else text[:1].lower() + text[1:]
    section = option.name.rpartition(".")[0]

    def typed(name: re.Match[str]) -> str:
        inside = f"{section}.{name[0]}" if section else name[0]
        return flags.get(inside, flags.get(name[0], name[0]))

    text = _OTHER.sub(typed, text)
    if option.is_list and option.is_each and not option.spelling.is_word and "repeated" not in text:
        text += "; may be repeated"
    if "(default:" in text:
        return text
    usual = _default(option)
    if not usual and (stated := _NONE.search(text)):
        text, usual = text[: stated.start()], stated[1]
    return f"{text} (default: {usual})" if usual else text


def _default(option: Option) -> str:
    """Default of an option as it is typed; "" of a bare word, of one that must be given, or of a switch that is off."""
    value = option.default
    if option.is_bool and not value:
        return ""
    if value is None or value in ((), {}, ""):
        return ""
    values = value if isinstance(value, tuple | list) else (value,)
    texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in values]
    return "true" if value is True else " ".join(texts)
