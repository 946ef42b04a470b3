"""Words of `expertmesh train` and `sweep`: a recipe, the verb's own options, and every option of the recipe's
`RunConfig`."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from expertmesh.cli.config_file import read_config_file
from expertmesh.cli.deepspeed_file import read_deepspeed_file
from expertmesh.cli.help import help_of, name_of
from expertmesh.cli.options import options_of
from expertmesh.cli.parse import (
    holds_model,
    made,
    split_words,
    value_of,
    values_in_file,
    wants_help,
)
from expertmesh.config.base import is_there
from expertmesh.config.fields import InputFile, Operation, OptionsFile, Spelling, Word
from expertmesh.config.run import RunConfig, with_fitting_warmup
from expertmesh.config.values import shown, some_of
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family, Recipes
from expertmesh.models.registry import DEFAULT, absent_families, find_family, recipe_owners


class TrainVerb(Operation):
    """Trains a model from a recipe, or fine-tunes the model of a folder; every value can be changed by an option.

    examples:
      expertmesh train gpt-moe-demo
      expertmesh train gpt-moe-demo --train.steps 100 --train.run-dir runs/short --data.path my_texts/
      expertmesh train gpt-moe-demo --model.moe.num-experts 16 --model.moe.top-k 4 --dry-run
      expertmesh train models/Qwen3-30B-A3B --data.path chats.jsonl --train.epochs 2 --train.run-dir runs/tuned
    """

    refused: ClassVar[Mapping[str, str]] = {}
    """Options of training that the verb does not have, with the reason and the fix."""
    recipe: Annotated[str | None, Spelling("RECIPE"), Word] = None
    """recipe, or folder of a model to fine-tune: a run, or one in transformers' format; expertmesh train RECIPE --help
    shows its values"""
    dry_run: bool = False
    """print the resolved configuration, parameter counts and memory, without training"""
    verbose: bool = False
    """list each skipped document, instead of counts by reason"""
    family: Annotated[str | None, Spelling("NAME")] = None
    """model family, or your own as module:name (docs/extending.md) (default: the recipe's)"""
    config: OptionsFile | None = None
    """YAML or JSON file with option values, such as a run's config.json; options on the command line take precedence"""
    deepspeed: InputFile | None = None
    """DeepSpeed JSON config; keys without a counterpart are errors; --config and options on the command line take
    precedence"""


class ParsedRun(NamedTuple):
    """Parsed words of `expertmesh train`."""

    recipe: str  # name of the recipe
    config: RunConfig
    dry_run: bool  # whether the run is only described
    family: Family  # model family
    from_file: frozenset[str]  # dotted names of the options in the `--config` file
    from_words: frozenset[str]  # dotted names of the options on the command line
    options: TrainVerb  # the verb's own options


def parse_run_config(
    argv: Sequence[str], *, recipes: Recipes | None = None, kind: type[TrainVerb] = TrainVerb
) -> ParsedRun:
    """Parse the words after `expertmesh train`.

    If a shorter `--train.steps` (or `--optim.schedule-steps`) leaves no room for the recipe's warm-up, the warm-up
    keeps its share of the steps, unless `--optim.warmup-steps` is given.

    Args:
        argv: RECIPE, or the folder of a model to fine-tune (`Family.finetune`), `--section.field value` and options of
            the verb, in any order. The recipe may be left out if the `--config` file names one, or a user's family has
            only one.
        recipes: functions by name; None: recipes of the family, or of all families of this package.
    """
    verb, name, file = name_of(kind), _value_after("--family", argv), _value_after("--config", argv)
    given = None if name is None else find_family(name)
    owners = recipe_owners() if given is None else dict.fromkeys(given.find_recipes(), given)
    if recipes is None:
        recipes = {n: family.find_recipes()[n] for n, family in owners.items()}
    sections, saved = ({}, None) if file is None else read_config_file(file)
    in_words = [*argv, *([] if saved is None else [saved])]
    named = next((word for word in in_words if word in recipes), None)
    default = (given or DEFAULT).config() if named is None else recipes[named]()
    own, of_run = options_of(kind), options_of(type(default))
    split = split_words(argv, own | of_run | own, verb=verb, known=recipes)
    words = [*split.words, *split.rest] or ([] if saved is None else [saved])
    if not words and given is not None and len(recipes) == 1:
        words = list(recipes)
    folder = words[0] if words and given is None and words[0] not in recipes else ""
    if folder and holds_model(folder) and DEFAULT.finetune is not None:
        recipes = {**recipes, folder: partial(DEFAULT.finetune, folder)}
    if wants_help(argv):
        print_train_help(words[0] if words else None, recipes, type(default), kind)
        raise SystemExit(0)
    if not words:
        ends = [texts[-1] for option, texts in split.flags.values() if option.is_list and texts]
        near = [one for text in ends for one in difflib.get_close_matches(text, recipes, n=1)]
        hint = f"did you mean {near[0]}? known: " if near else f"say one after '{verb}': "
        raise ConfigError(f"no recipe given; {hint}{some_of(recipes)}")
    if len(words) > 1:
        fix = "options look like --section.field value"
        raise ConfigError(f"unexpected word {shown(words[1])!r}; {fix}")
    if words[0] != named:
        default = _recipe(words[0], recipes)()
    typed = {one: value_of(option, texts) for one, (option, texts) in split.flags.items()}
    options = made(kind, {one: value for one, value in typed.items() if one in own})
    values = {one: value for one, value in typed.items() if one not in own}
    in_file = {} if options.deepspeed is None else read_deepspeed_file(options.deepspeed)
    in_file |= {} if file is None else values_in_file(file, sections, of_run, verb)
    family = given or owners.get(words[0]) or find_family(default.family)
    begin = values.get("train.init_from", words[0])
    if words[0] == default.train.init_from and begin != words[0]:
        raise ConfigError(
            "train.init_from",
            begin,
            f"the first word is {words[0]}, another model",
            "leave one of them out",
        )
    config = default.updated(with_fitting_warmup(default, in_file | values))
    config = config.model_copy(update={"family": family.name})
    given_names = frozenset(in_file), frozenset(values)
    return ParsedRun(words[0], config, options.dry_run, family, *given_names, options)


def _value_after(flag: str, argv: Sequence[str]) -> str | None:
    """Value of an option that decides which other options there are; None: it is not given, or has no value."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word.partition("=")[0] == flag:
            return (word.partition("=")[2] if "=" in word else following) or None
    return None


def print_train_help(
    recipe: str | None,
    recipes: Recipes,
    without: Callable[[], RunConfig] = DEFAULT.config,
    kind: type[TrainVerb] = TrainVerb,
) -> None:
    """Print the options with the defaults of a recipe; None: with the defaults of `without`."""
    default = without() if recipe is None else _recipe(recipe, recipes)()
    more = ""
    if recipe is None:
        width = max(map(len, recipes), default=0)
        rows = (f"  {name:<{width}}  {_first_line(function)}" for name, function in recipes.items())
        more = "\n".join(["recipes:", *rows])
    own = options_of(kind)
    options = own | options_of(type(default), default=default) | own
    shown_options = {one: option for one, option in options.items() if one not in kind.refused}
    text = help_of(kind, shown_options, more=more)
    print(text if recipe is None else text.replace("[RECIPE]", recipe, 1))


def _first_line(function: Callable[[], RunConfig]) -> str:
    return (getattr(function, "summary", None) or inspect.getdoc(function) or "").partition("\n")[0]


def _recipe(name: str, recipes: Recipes) -> Callable[[], RunConfig]:
    if name in recipes:
        return recipes[name]
    near = difflib.get_close_matches(name, recipes, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if "/" in name or (is_there(name) and Path(name).is_dir()):
        hint = "nor is it a folder with a model's config.json; "
    known = f"known: {some_of(recipes)}{absent_families()}"
    raise ConfigError(f"unknown recipe {shown(name)!r}; {hint}{known}")
