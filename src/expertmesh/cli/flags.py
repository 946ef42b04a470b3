"""Parsing of `expertmesh train RECIPE --section.field value ...` to a validated configuration, and `OptionParser` for other verbs.

Names, defaults and help texts of the options come from the family's `RunConfig`; tyro renders the help. The
configuration itself checks values, so the command line and Python give the same one-line errors
(docs/decisions/002-command-line-flags.md says why tyro does not parse them).
"""

import argparse
import difflib
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel

from expertmesh.cli.config_file import flat_values, read_config_file
from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.prog_name import flag_name
from expertmesh.config.base import EMPTY, expanded, nearest_name, shown
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.config.renamed import current_name
from expertmesh.config.run import RunConfig, with_fitting_warmup
from expertmesh.errors import ConfigError, command
from expertmesh.models.family import Family, Recipes
from expertmesh.models.registry import DEFAULT, absent_families, find_family, recipe_owners

_WIDE = 60
"""Columns from which a whole usage line fits."""
_LEAST = 20
"""Minimum columns for rendering options."""
_POWER = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")
"""Number with a power of ten."""
_SWITCHES = {"-h": "help", "--help": "help", "--dry-run": "dry-run", "--verbose": "verbose"}


class ParsedRun(NamedTuple):
    """Parsed words of `expertmesh train`.

    Attributes:
        recipe: name of the recipe.
        config: configuration of the run.
        dry_run: whether the run is only described.
        family: model family.
        from_file: dotted names of the options in the `--config` file.
        from_words: dotted names of the options on the command line.
        verbose: whether every skipped text is reported by name.
    """

    recipe: str
    config: RunConfig
    dry_run: bool
    family: Family
    from_file: frozenset[str] = frozenset()
    from_words: frozenset[str] = frozenset()
    verbose: bool = False


@dataclass(frozen=True)
class _Option:
    name: str  # dotted, as in the configuration: "model.moe.top_k"
    is_bool: bool
    is_list: bool
    may_be_empty: bool
    is_optional: bool
    is_whole: bool


class OptionParser(argparse.ArgumentParser):
    """argparse for other verbs than train; errors are one-line `ConfigError`s that suggest the nearest option."""

    def __init__(self, **options: Any) -> None:
        """Create a parser that keeps the line breaks of description and epilog; options as for argparse."""
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._takes_run, self._words = False, ""
        self.register("type", int, lambda text: int(_whole(text)))

    def add_run(self, words: str = "", *, what: str = "run directory", **help_of: Any) -> None:
        """Add the run as the first word, stored as `run`; with `--run` or `--run-dir` instead, all words are the
        others.

        `--run-dir` is for torchrun, which takes `--run` as an abbreviation of its own `--run-path`.

        Args:
            words: destination of the words after the run, a list; "": none.
            what: help of the run.
            help_of: `metavar` and `help` of the other words.
        """
        self._takes_run, self._words = True, words
        self.add_argument("folder", nargs="?", metavar="RUN", help=what)
        if words:
            self.add_argument(words, nargs="*", **help_of)
        self.add_argument("--run", "--run-dir", metavar="RUN", help="the same, in its place")

    def parse_args(self, args: Sequence[str]) -> Any:  # type: ignore[override]
        """Parse options and words in any order; after `--` all are words.

        Raises:
            ConfigError: a word breaks a rule, or the run does not exist.
        """
        self.usage = self._usage() if self.usage is None else self.usage
        cut = list(args).index("--") if "--" in args else len(args)
        # NUL, which cannot be typed, keeps argparse from taking the word for an option
        shielded = [f"\0{word}" for word in args[cut + 1 :]]
        found = self.parse_intermixed_args([*args[:cut], *shielded])
        if self._takes_run and self._words and None not in (found.run, found.folder):
            self._check_one_run(found)
        for action in self._actions:
            self._check_not_empty(action, getattr(found, action.dest, None))
            if not action.option_strings:
                value = getattr(found, action.dest)
                if isinstance(value, list):
                    value = [word.removeprefix("\0") for word in value]
                elif value is not None:
                    value = value.removeprefix("\0")
                setattr(found, action.dest, value)
        if self._takes_run:
            self._find_run(found)
        return found

    def _check_not_empty(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for an option or a run that is empty, as from an unset variable; other words may be."""
        flag = next(reversed(action.option_strings), "")
        if not flag and action.metavar not in ("RUN", "DIR"):
            return
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and not one.strip():
                raise ConfigError(f"{flag or action.metavar} '': {'; '.join(EMPTY)}")

    def _check_one_run(self, found: Any) -> None:
        """Raise ConfigError if a word next to `--run` is a run as well; words after `--` are not checked."""
        for word in (found.folder, *getattr(found, self._words)):
            if word and not word.startswith("\0") and _holds_model(word):
                raise ConfigError(
                    f"two runs given, {word} and {found.run}; leave one out, or write -- before a word that is none:"
                    f" {self._example}"
                )

    def _find_run(self, found: Any) -> None:
        if found.run is not None and found.folder is not None:
            if not self._words:
                rule = f"two runs given, {found.folder} and {found.run}"
                raise ConfigError(f"{rule}; write one: {self._example}")
            setattr(found, self._words, [found.folder, *getattr(found, self._words)])
        elif found.run is None and found.folder is None:
            raise ConfigError(f"no run given; write one: {self._example} (see {self._help})")
        elif found.run is None:
            found.run, path = found.folder, expanded(found.folder)
            if self._words and not path.is_dir():
                what = "is no folder" if path.exists() else "does not exist"
                word = shown(found.run) if " " in found.run else found.run
                raise ConfigError(
                    f"run {word}: {what}, and the first word is the run: {self._example};"
                    f" train one with: {command('train')}{how_to_fetch(found.run)}"
                )

    @property
    def _example(self) -> str:
        words = f" {self._words.upper()} ..." if self._words else ""
        return command(f"{self.prog.removeprefix('expertmesh ')} runs/demo{words}")

    def format_help(self) -> str:
        """Help wrapped to the terminal; the usage line shows required options only."""
        return fitted(super().format_help())

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print like argparse, but do not ignore write errors."""
        if message:
            (file or sys.stderr).write(message)

    def _usage(self) -> str:
        options, words = [], []
        for action in self._actions:
            name = action.metavar if isinstance(action.metavar, str) else action.dest
            if action.option_strings:
                more = " ..." if action.nargs == "+" else ""
                if action.required:
                    options.append(f"{action.option_strings[0]} {name}{more}")
            elif action.dest == "folder":
                words.append(name)
            elif action.nargs in ("*", "?"):
                words.append(f"[{name}{' ...' if action.nargs == '*' else ''}]")
            else:
                words.append("|".join(action.choices or (name,)))
        return " ".join([self.prog, *words, *options, "[options]"])

    @property
    def _help(self) -> str:
        return command(f"{self.prog.removeprefix('expertmesh ')} --help")

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`, where argparse would print its usage and exit."""
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown is not None and unknown.group(1).startswith("-"):
            word = unknown.group(1).split("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self._help}"
            raise ConfigError(f"unknown option {word}; {hint}")
        raise ConfigError(f"{message}; see {self._help}")


def add_data(parser: OptionParser) -> None:
    """Add the option --data.path, stored as `data_path`, to a verb that reads the data of a run."""
    parser.add_argument(
        "--data.path",
        dest="data_path",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="where the run's data are now (where they were)",
    )


def either(folder: str | None, same: str | None) -> str | None:
    """The folder that is given as the first word, or by the option in its place; None: by neither.

    Raises:
        ConfigError: it is given by both.
    """
    if None not in (folder, same):
        raise ConfigError(f"two folders given, {folder} and {same}; leave one out")
    return same if folder is None else folder


def _whole(text: str) -> str:
    """Whole number as digits, where it is written like 1e3; any other text unchanged."""
    value = float(text) if _POWER.fullmatch(text) else 0.5
    return str(int(value)) if value.is_integer() else text


def _holds_model(word: str) -> bool:
    """Whether a word is the path of a run or hub folder."""
    try:
        return (expanded(word) / "config.json").is_file()
    except (OSError, ConfigError):  # a text that is no valid path
        return False


def check_least(options: Any, **least: float) -> None:
    """Raise ConfigError unless given numbers are finite and large enough.

    Args:
        options: result of an `OptionParser`.
        least: minimum of each number, by name.

    Raises:
        ConfigError: a number is smaller, or not finite.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and not smallest <= value < float("inf"):
            fix = "raise it" if value < smallest else "give a finite number"
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: must be at least {smallest:g}; {fix}"
            )


def parse_run_config(argv: Sequence[str], *, recipes: Recipes | None = None) -> ParsedRun:
    """Parse the words after `expertmesh train`.

    If a shorter `--train.steps` (or `--optim.schedule-steps`) leaves no room for the recipe's warm-up, the warm-up
    keeps its share of the steps, unless `--optim.warmup-steps` is given.

    Args:
        argv: RECIPE, `--section.field value` in any order, `--dry-run`, `--verbose`, `--family module:name`, `--config
            FILE`. The recipe may be left out if a user's family has only one.
        recipes: functions by name; None: recipes of the family, or of all families of this package.

    Raises:
        ConfigError: a word is unknown or breaks a rule; one line with the word and the fix.
        SystemExit: with code 0 after `--help`.
    """
    name, argv = taken("family", argv)
    given = None if name is None else find_family(name)
    file, argv = taken("config", argv)
    owners = recipe_owners() if given is None else dict.fromkeys(given.find_recipes(), given)
    if recipes is None:
        recipes = {n: family.find_recipes()[n] for n, family in owners.items()}
    from_file, saved = ({}, None) if file is None else read_config_file(file)
    words_and_saved = [*argv, *([] if saved is None else [saved])]
    named = next((word for word in words_and_saved if word in recipes), None)
    default = (given or DEFAULT).config() if named is None else recipes[named]()
    words, flags, switches = _split(argv, type(default), recipes)
    words = words or ([] if saved is None else [saved])
    if not words and given is not None and len(recipes) == 1:
        words = list(recipes)
    if "help" in switches:
        print_train_help(words[0] if words else None, recipes, type(default))
        raise SystemExit(0)
    if not words:
        ends = [texts[-1] for option, texts in flags.values() if option.is_list and texts]
        near = [one for text in ends for one in difflib.get_close_matches(text, recipes, n=1)]
        hint = f"did you mean {near[0]}? known: " if near else "say one after 'train': "
        raise ConfigError(f"no recipe given; {hint}{', '.join(recipes)}")
    if len(words) > 1:
        fix = "options look like --section.field value"
        raise ConfigError(f"unexpected word {shown(words[1])!r}; {fix}")
    default = _recipe(words[0], recipes)()
    values = {name: _value(option, texts) for name, (option, texts) in flags.items()}
    in_file: dict[str, Any] = {}
    if file is not None:
        options = _options(type(default))
        read = flat_values(from_file, list(options), file)
        in_file = {name: _of_file(options[name], value) for name, value in read.items()}
        values = in_file | values
    family = given or owners.get(words[0]) or find_family(default.family)
    config = default.updated(with_fitting_warmup(default, values))
    config = config.model_copy(update={"family": family.name})
    dry_run, given_names = "dry-run" in switches, (frozenset(in_file), frozenset(flags))
    verbose = "verbose" in switches
    return ParsedRun(words[0], config, dry_run, family, *given_names, verbose=verbose)


def taken(option: str, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Value of an option that is not part of the configuration, or None, and the other words."""
    others, found, words = [], None, iter(argv)
    for word in words:
        spelled, equals, text = word.partition("=")
        if spelled != f"--{option}":
            others.append(word)
            continue
        value = text if equals else next(words, "")
        if not value:
            raise ConfigError(f"--{option} needs a value; write it after the option")
        if found is not None:
            raise ConfigError(f"--{option} is given twice; give it once")
        found = value
    return found, others


def print_train_help(
    recipe: str | None, recipes: Recipes, without: Callable[[], RunConfig] = DEFAULT.config
) -> None:
    """Print the options with the defaults of a recipe; None: with the defaults of `without`."""
    import tyro

    default = without() if recipe is None else _recipe(recipe, recipes)()
    print(_train_help_head(recipe, recipes))
    columns = get_terminal_size().columns
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(max(columns, _LEAST))  # with one column tyro never ends
    try:
        tyro.cli(
            type(default),
            default=default,
            args=["--help"],
            prog=f"{'expertmesh ' if columns >= _WIDE else ''}train {recipe or 'RECIPE'}",
            description="",  # the head above describes the verb
        )
    except SystemExit:
        return
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _train_help_head(recipe: str | None, recipes: Recipes) -> str:
    lines = [
        "Trains a model from a recipe; every value of the recipe can be changed by an option.",
        "",
        "  expertmesh train gpt-moe-demo",
        "  expertmesh train gpt-moe-demo --train.steps 100 --train.run-dir runs/short --data.path my_texts/",
        "  expertmesh train gpt-moe-demo --model.moe.num-experts 16 --model.moe.top-k 4 --dry-run",
        "",
        "  --dry-run        print the resolved configuration, parameter counts and memory, and stop",
        "  --verbose        name every text that is left out, and not only how many and why",
        "  --family NAME    a model family by its name, or one of your own as module:name (docs/extending.md)",
        "  --config FILE    values from a YAML file, for example a run's config.json; options beside it win",
        "  lists            [STR [STR ...]]: values with blanks or commas between, or the option before each, as you like",
    ]
    if recipe is None:
        width = max(map(len, recipes), default=0)
        lines += ["", "recipes (their defaults: expertmesh train NAME --help):"]
        lines += [
            f"  {name:<{width}}  {_first_line(function)}" for name, function in recipes.items()
        ]
    return fitted("\n".join([*lines, ""]))


def _first_line(function: Callable[[], RunConfig]) -> str:
    return (getattr(function, "summary", None) or function.__doc__ or "").strip().partition("\n")[0]


def _recipe(name: str, recipes: Recipes) -> Callable[[], RunConfig]:
    if name in recipes:
        return recipes[name]
    near = difflib.get_close_matches(name, recipes, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    known = f"known: {', '.join(recipes)}{absent_families()}"
    raise ConfigError(f"unknown recipe {shown(name)!r}; {hint}{known}")


def _split(
    argv: Sequence[str], config_type: type[RunConfig], recipes: Collection[str]
) -> tuple[list[str], dict[str, tuple[_Option, list[str]]], set[str]]:
    """Bare words, texts by option, and switches by purpose."""
    options = _options(config_type)
    words: list[str] = []
    flags: dict[str, tuple[_Option, list[str]]] = {}
    switches: set[str] = set()
    place = 0
    while place < len(argv):
        word = argv[place]
        place += 1
        if word in _SWITCHES:
            switches.add(_SWITCHES[word])
        elif not word.startswith("-") or word == "-":
            words.append(word)
        else:
            spelled, equals, text = word.partition("=")
            option, negated = _find(spelled, options)
            if equals:
                texts = [text]
            else:
                texts = _texts_after(option, argv[place:], () if words else recipes)
                place += len(texts)
            if option.is_bool and (negated or not texts):
                if negated and texts:
                    raise ConfigError(f"{spelled} takes no value; leave {shown(texts[0])!r} out")
                texts = ["false" if negated else "true"]
            if option.name in flags and option.is_list:
                texts = [*flags[option.name][1], *texts]
            elif option.name in flags:
                raise ConfigError(f"{flag_name(option.name)} is given twice; give it once")
            flags[option.name] = (option, texts)
    return words, flags, switches


def _options(config_type: type[BaseModel], prefix: str = "") -> dict[str, _Option]:
    found: dict[str, _Option] = {}
    for name, field in config_type.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= _options(kind, f"{prefix}{name}.")
        else:
            kinds = (kind, *typing.get_args(kind))
            found[prefix + name] = _Option(
                name=prefix + name,
                is_bool=kind is bool,
                is_list=any(typing.get_origin(k) is tuple for k in kinds),
                may_be_empty=typing.get_origin(kind) is tuple,
                is_optional=type(None) in typing.get_args(kind),
                is_whole=int in kinds and float not in kinds,
            )
    return found


def _find(spelled: str, options: Mapping[str, _Option]) -> tuple[_Option, bool]:
    """Option of a word, and whether it was written as `--section.no-field`."""
    name = current_name(spelled.lstrip("-").replace("-", "_"))
    if spelled.startswith("--") and name in options:
        return options[name], False
    section, dot, leaf = name.rpartition(".")
    if spelled.startswith("--") and leaf.startswith("no_"):
        positive = options.get(section + dot + leaf.removeprefix("no_"))
        if positive is not None and positive.is_bool:
            return positive, True
    inside = [known for known in options if known.startswith(f"{name}.")]
    if inside:
        raise ConfigError(
            f"{spelled} is a section; name a field of it, for example {flag_name(inside[0])}"
        )
    near = nearest_name(name, ["dry_run", "verbose", "help", "family", "config", *options])
    hint = f"did you mean {flag_name(near)}?" if near else f"see {command('train --help')}"
    raise ConfigError(f"unknown option {spelled}; {hint}")


def _texts_after(option: _Option, words: Sequence[str], recipes: Collection[str]) -> list[str]:
    """Words that belong to an option: one; for a list all; for a switch true, false or none.

    Args:
        option: the option.
        words: all words after it.
        recipes: recipe names, which end a list or follow a switch, if no recipe was given yet.
    """
    following: list[str] = []
    for word in words:
        if word.startswith("--") or word in ("-h", "-"):
            break
        if option.is_bool and recipes and word.lower() not in ("true", "false"):
            break  # the word is the recipe
        if option.is_list and word in recipes:
            break
        following.append(word)
        if not option.is_list:
            break
    if not following and not option.is_bool:
        empty = ", or none" if option.may_be_empty else ""
        raise ConfigError(
            f"{flag_name(option.name)} needs a value{empty}; write it after the option"
        )
    return following


def listed(texts: Sequence[str], *, are_paths: bool = False) -> list[str]:
    """Values of a list option, separated by spaces or commas, or with the option repeated.

    Args:
        texts: the words.
        are_paths: whether a word with commas may be one existing path, as PATH, PATH:WEIGHT or NAME=PATH.
    """
    values: list[str] = []
    for text in texts:
        may_be_path = are_paths and "," in text
        whole = (text, text.rpartition(":")[0], text.partition("=")[2]) if may_be_path else ()
        is_one = any(os.path.exists(os.path.expanduser(name)) for name in whole)  # noqa: PTH110, PTH111
        values += (
            [text] if is_one else [value.strip() for value in text.split(",") if value.strip()]
        )
    return values


def _of_file(option: _Option, value: Any) -> Any:
    """Value from a file; texts are parsed as on the command line."""
    return _value(option, [value]) if isinstance(value, str) else value


def _value(option: _Option, texts: list[str]) -> Any:
    """Value for the configuration; numbers remain text, which the configuration converts and checks."""
    if not option.is_list:
        if option.is_optional and texts[0].lower() == "none":
            return None
        return _whole(texts[0]) if option.is_whole else texts[0]
    values = listed(texts, are_paths=not option.may_be_empty or option.name.endswith("path"))
    if (
        blank := next((text for text in texts if not text.replace(",", " ").strip()), None)
    ) is not None:
        raise ConfigError(
            f"{flag_name(option.name)} {shown(blank)}: must not be empty; give a value, or none, or leave the option out"
        )
    if [value.lower() for value in values] == ["none"]:
        return None if option.is_optional else ()
    return values[0] if len(values) == 1 and not option.may_be_empty else tuple(values)
