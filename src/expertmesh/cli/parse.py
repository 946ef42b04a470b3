"""Parsing of the words after `expertmesh VERB` to the verb's `Operation`: one grammar for all verbs.

Names, rules, defaults and help texts come from the fields of the operation, which itself converts and checks the
values, so the command line and Python give the same one-line errors (docs/decisions/002-command-line-flags.md).
"""

import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from expertmesh.cli.config_file import flat_values, read_config_file
from expertmesh.cli.help import help_of, name_of, usage_words
from expertmesh.cli.options import Option, entry_kind, flag_name, library_names, options_of
from expertmesh.cli.prog_name import Flags
from expertmesh.config.base import EMPTY, expanded, nearest_name, parse_json
from expertmesh.config.fields import Operation
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.peer_options import how_without
from expertmesh.config.renamed import current_name
from expertmesh.config.values import shown
from expertmesh.errors import ConfigError, command

_POWER = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")
"""Number with a power of ten."""
_FALSE_OR_TRUE = ("true", "false", "none")
_O = TypeVar("_O", bound=Operation)


class Split(NamedTuple):
    """Words after a verb, taken apart."""

    words: list[str]  # bare words in front of `--`
    rest: list[str]  # words behind `--`
    flags: dict[str, tuple[Option, list[str]]]  # option and texts by its spelling

    def values(self) -> dict[str, Any]:
        """Values by dotted name; numbers are texts still."""
        return {option.name: value_of(option, texts) for option, texts in self.flags.values()}


def parsed(kind: type[_O], argv: Sequence[str]) -> _O:
    """Operation of a verb.

    Args:
        argv: words after the verb's name: options and bare words in any order; behind `--` all are bare.
    """
    if wants_help(argv):
        print(help_of(kind))
        raise SystemExit(0)
    options = options_of(kind)
    split = split_words(argv, options, verb=name_of(kind))
    values = split.values() | _values_of_words(kind, split)
    for option in options.values():
        if option.spelling.is_options and values.get(option.name) is not None:
            path = values[option.name]
            in_file = values_in_file(path, read_config_file(path)[0], options, name_of(kind))
            values = in_file | values
    return made(kind, values)


def made(kind: type[_O], values: Mapping[str, Any]) -> _O:
    """Operation with values by dotted name."""
    for option in options_of(kind).values():
        if option.field.is_required() and option.name not in values:
            raise ConfigError(
                f"{option.flag}: must be given; write {option.flag} {usage_words(option)}"
                f" (see {command(f'{name_of(kind)} --help')})"
            )
    try:
        return kind(**nested(values))
    except ConfigError as error:
        raise ConfigError(Flags(names=library_names(kind)).spell(error)) from None


def values_in_file(path: str, sections: Mapping[Any, Any], options: Mapping[str, Option], verb: str) -> dict[str, Any]:
    """Values by dotted name from the contents of a file; texts are read as on the command line."""
    read = flat_values(sections, list(options), path, verb=verb)
    return {
        options[name].name: value_of(options[name], [value]) if isinstance(value, str) else value
        for name, value in read.items()
    }


def wants_help(argv: Sequence[str]) -> bool:
    """Whether a word in front of `--` asks for help."""
    return not {"-h", "--help"}.isdisjoint(argv[: _num_before_dashes(argv)])


def _num_before_dashes(argv: Sequence[str]) -> int:
    return list(argv).index("--") if "--" in argv else len(argv)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as nested mappings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        group = found
        for section in sections:
            group = group.setdefault(section, {})
        group[last] = value
    return found


def split_words(argv: Sequence[str], options: Mapping[str, Option], *, verb: str, known: Collection[str] = ()) -> Split:
    """Words of a verb taken apart.

    Args:
        options: options by spelling; those that are words say how many bare ones there may be.
        known: bare words that end a list, if there was none yet.
    """
    cut = _num_before_dashes(argv)
    places = [option for option in options.values() if option.spelling.is_word]
    room = float("inf") if any(option.is_list for option in places) else len(places)
    has_texts = any(option.spelling.is_free for option in places)
    also = {name: option for option in options.values() for name in option.spelling.also}
    if verb not in ("train", "sweep"):  # other verbs have few options, and need no section
        also |= {option.spelled.rpartition(".")[2]: option for option in options.values()}
    split = Split([], list(argv[cut + 1 :]), {})
    place = 0
    while place < cut:
        word = argv[place]
        place += 1
        if word in ("-h", "--help"):
            continue
        if not word.startswith("-") or word == "-":
            split.words.append(word)
            continue
        spelled, equals, text = word.partition("=")
        option, negated = _find(spelled, {**also, **options}, verb)
        if equals:
            texts = [text]
        else:
            is_open = len(split.words) < room
            ends = () if split.words else known
            is_several = option.is_list and not option.is_each and not has_texts
            texts = _texts_after(option, argv[place:cut], ends, is_open=is_open, is_several=is_several)
            place += len(texts)
        if option.is_bool and (negated or not texts):
            if negated and texts:
                raise ConfigError(f"{spelled} takes no value; leave {shown(texts[0])!r} out")
            texts = ["false" if negated else "true"]
        if option.spelled in split.flags and option.is_list:
            texts = [*split.flags[option.spelled][1], *texts]
        elif option.spelled in split.flags:
            raise ConfigError(f"{option.flag} is given twice; give it once")
        split.flags[option.spelled] = (option, texts)
    return split


def _find(spelled: str, options: Mapping[str, Option], verb: str) -> tuple[Option, bool]:
    """Option of a word, and whether it was written as `--section.no-field`."""
    name = current_name(spelled.lstrip("-").replace("-", "_"))
    option = options.get(name)
    if spelled.startswith("--") and option is not None and _has_flag(option):
        return option, False
    section, dot, leaf = name.rpartition(".")
    if spelled.startswith("--") and leaf.startswith("no_"):
        positive = options.get(section + dot + leaf.removeprefix("no_"))
        if positive is not None and positive.is_bool:
            return positive, True
    inside = [known for known in options if known.startswith(f"{name}.")]
    if inside:
        raise ConfigError(f"{spelled} is a section; name a field of it, for example {flag_name(inside[0])}")
    known = [name for name, option in options.items() if _has_flag(option)]
    near = _nearest(spelled, name, ["help", *known])
    hint = f"did you mean {near}?" if near else f"see {command(f'{verb} --help')}"
    raise ConfigError(f"unknown option {spelled}; {how_without(name, options) or hint}")


def _nearest(spelled: str, name: str, known: list[str]) -> str | None:
    """Option that a word was meant for: a similar name, or the only one that begins so."""
    flags = [flag_name(one) for one in known]
    near = nearest_name(name, known)
    begun = [flag for flag in flags if flag.startswith(spelled.replace("_", "-"))]
    alike = difflib.get_close_matches(spelled, flags, n=1, cutoff=0.75)
    return flag_name(near) if near else begun[0] if len(begun) == 1 else next(iter(alike), None)


def _has_flag(option: Option) -> bool:
    """Whether an option may be typed with dashes: a bare word may if it has other names."""
    return not option.spelling.is_word or bool(option.spelling.also)


def _texts_after(
    option: Option,
    words: Sequence[str],
    ends: Collection[str],  # words that end a list
    *,
    is_open: bool,  # whether bare words may follow, which a switch leaves
    is_several: bool,  # whether all words up to the next option belong to it; beside prompts a list takes one
) -> list[str]:
    """Words that belong to an option: one; for a list all; for a switch true, false or none."""
    following: list[str] = []
    for word in words:
        if word.startswith("--") or word == "-h" or (word == "-" and (is_several or option.is_bool)):
            break
        if option.is_bool and is_open and word.lower() not in _FALSE_OR_TRUE:
            break
        if is_several and word in ends:
            break
        following.append(word)
        if not is_several:
            break
    if not following and not option.is_bool:
        empty = ", or none" if option.may_be_empty and not option.field.is_required() else ""
        raise ConfigError(f"{option.flag} needs a value{empty}; write it after the option")
    return following


def _values_of_words(kind: type[Operation], split: Split) -> dict[str, Any]:
    """Values of the bare words of a verb, in the order of its fields; a list takes all that are left."""
    words = [*split.words, *split.rest]
    found: dict[str, Any] = {}
    places = [option for option in options_of(kind).values() if option.spelling.is_word]
    is_run = bool(places) and "RUN" in places[0].spelling.metavar and not places[0].is_list
    for option in places:
        given = option.spelled in split.flags
        if option.is_list:
            own = value_of(*split.flags[option.spelled]) if given else ()
            words, found[option.name] = [], (*words, *own)
        if option.is_list and (found[option.name] or not option.field.is_required()):
            continue
        if given and words and len(places) == 1:
            what = what_of(option)
            one, other = words[0], split.flags[option.spelled][1][0]
            raise ConfigError(f"two {what}s given, {one} and {other}; leave one out: {example_of(kind)}")
        if not given and words and not option.is_list:
            found[option.name] = words.pop(0)
        elif option.is_list or (not given and option.field.is_required()):
            raise ConfigError(
                f"no {what_of(option)} given; write one: {example_of(kind)} (see {command(f'{name_of(kind)} --help')})"
            )
    if words:
        raise ConfigError(f"unexpected word {shown(words[0])!r}; see {command(f'{name_of(kind)} --help')}")
    if is_run and len(places) > 1:
        _check_run(kind, split, found.get(places[0].name))
    return found


def _check_run(kind: type[Operation], split: Split, word: str | None) -> None:
    """Raise ConfigError if the first of several words is no run, or if one is a run beside `--run`."""
    if word is None:
        given = next(texts[0] for option, texts in split.flags.values() if option.spelling.also)
        for one in split.words:
            if holds_model(one):
                raise ConfigError(
                    f"two runs given, {one} and {given}; leave one out, or write -- before a word that is none:"
                    f" {example_of(kind)}"
                )
    elif word.strip() and not (path := expanded(word)).is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"run {shown(word) if ' ' in word else word}: {what}, and the first word is the run: {example_of(kind)};"
            f" train one with: {command('train')}{how_to_fetch(word)}"
        )


def what_of(option: Option) -> str:
    """Noun of a bare word in messages."""
    return {"DIR": "folder"}.get(option.spelling.metavar, usage_words(option).lower())


def example_of(kind: type[Operation]) -> str:
    """First example of a verb's help, as a command."""
    examples = re.findall(r"^ +(?:torchrun .*-m )?expertmesh (.+?)(?:  +#.*)?$", kind.__doc__ or "", re.MULTILINE)
    return command(examples[0] if examples else name_of(kind))


def holds_model(word: str) -> bool:
    """Whether a word is the path of a run or hub folder."""
    try:
        return (expanded(word) / "config.json").is_file()
    except (OSError, ConfigError):  # a text that is no valid path
        return False


def listed(texts: Sequence[str]) -> list[str]:
    """Values of a list option, separated by spaces or commas, or with the option repeated.

    A word with commas may be one existing path, as PATH, PATH:WEIGHT or NAME=PATH.
    """
    values: list[str] = []
    for text in texts:
        whole = (text, text.rpartition(":")[0], text.partition("=")[2]) if "," in text else ()
        is_one = any(os.path.exists(os.path.expanduser(name)) for name in whole)  # noqa: PTH110, PTH111
        values += [text] if is_one else [value.strip() for value in text.split(",") if value.strip()]
    return values


def value_of(option: Option, texts: Sequence[str]) -> Any:
    """Value of an option for the configuration; numbers remain text, which the configuration converts and checks."""
    if option.is_optional and [text.lower() for text in texts] == ["none"]:
        return None
    if option.is_strict:
        values = tuple(_said(text, entry_kind(option)) for text in texts)
        return values if option.is_list else values[0]
    if not option.is_list:
        if str in option.kinds and not texts[0].strip() and not option.spelling.is_free:
            raise ConfigError(f"{option.flag} {shown(texts[0])}: {'; '.join(EMPTY)}")
        return _whole(texts[0]) if option.is_whole else texts[0]
    blank = next((text for text in texts if not text.replace(",", " ").strip()), None)
    if blank is not None:
        rule, fix = EMPTY
        raise ConfigError(f"{option.flag} {shown(blank)}: {rule}; {fix.replace(', or', ', or none, or')}")
    values = tuple(texts) if option.is_each else tuple(listed(texts))
    if [value.lower() for value in values] == ["none"]:
        return None if option.is_optional else ()
    return values[0] if len(values) == 1 and not option.may_be_empty else values


def _said(text: str, kind: object) -> Any:
    """Value that a text says, for a configuration that takes no text for it; else the text, which is refused there."""
    try:
        if kind is int:
            return int(_whole(text))
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if kind is float:
            return int(text) if text.removeprefix("-").isdecimal() else float(text)
        return parse_json(text) if kind is dict else text
    except ValueError:
        return text


def _whole(text: str) -> str:
    """Whole number as digits, where it is written like 1e3; any other text unchanged."""
    value = float(text) if _POWER.fullmatch(text) else 0.5
    return str(int(value)) if value.is_integer() else text
