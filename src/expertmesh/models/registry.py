"""Registry of model families: the package's own, and yours by "module:name". Torch is imported only when a task is opened."""

import difflib
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from expertmesh.config.base import flat_changes, nearest_name, shown
from expertmesh.config.run import RunConfig, with_fitting_warmup
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family
from expertmesh.models.gpt.family import GPT
from expertmesh.models.seq2seq.family import SEQ2SEQ
from expertmesh.models.swin.family import SWIN

FAMILIES = {family.name: family for family in (GPT, SEQ2SEQ, SWIN)}
"""The families of this package by name."""

DEFAULT = GPT
"""The default family."""


def find_family(name: str) -> Family:
    """A family of this package by its name, or any family by "module:name"; the working directory is searched for modules, too.

    Raises:
        ConfigError: the name is unknown, the import fails, or the object is not a `Family`.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        near = nearest_name(name, list(FAMILIES))
        hint = f"did you mean {near}?" if near else "name your own as module:name"
        raise ConfigError("family", name, f"unknown, known here: {', '.join(FAMILIES)}", f"{hint}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(import_module(module), attribute, None)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "family",
            name,
            f"importing {module!r} failed: {error}",
            "check the name, and start where the module is",
        ) from error
    if not isinstance(found, Family):
        raise ConfigError(
            "family",
            name,
            f"{module} has no expertmesh Family of the name {attribute!r}",
            "define it there",
        )
    return found


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The complete configuration of a recipe, with some values changed.

    Args:
        name: name of a recipe, as listed by `expertmesh train --help`, for example "gpt-moe-demo".
        changes: new values by the dotted names of the command line's options, or in sections
            (`{"train": {"steps": 20}}`). A warm-up that does not fit into fewer steps is shortened with them.

    Returns:
        A frozen `expertmesh.RunConfig` of the recipe's family, to train with `expertmesh.train`. The `model` of a GPT recipe
        builds an `expertmesh.GPT`.

    Raises:
        ConfigError: there is no such recipe or option, or a value breaks a rule.

    Example:
        >>> config = em.recipe("gpt-moe-demo", {"train.steps": 20, "model.moe.top_k": 1})
        >>> config.model.moe.num_experts, config.optim.warmup_steps
        ((32,), 1)
    """
    recipes = {n: f for family in FAMILIES.values() for n, f in family.find_recipes().items()}
    if name not in recipes:
        near = difflib.get_close_matches(str(name), recipes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(recipes)}"
        raise ConfigError(f"recipe={shown(name)}: unknown recipe; {hint}")
    default: RunConfig = recipes[name]()
    return changed(default, changes or {})


def changed(default: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A validated copy of a configuration.

    Args:
        default: the configuration to copy.
        changes: new values by dotted name, or in sections; other values of a given section stay.

    Raises:
        ConfigError: the changes are not a mapping, a name is unknown, or a value breaks a rule.
    """
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes={shown(changes)}: must be options and their values; for example {{'train.steps': 20}}"
        )
    flat = flat_changes(default, changes)
    return default.updated(with_fitting_warmup(default, flat))
