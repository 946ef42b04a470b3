"""Registry of model families: of this distribution and of installed packages by name, and yours by "module:name".

Torch is imported only when a task is opened.
"""

import difflib
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from expertmesh.config.base import flat_changes, nearest_name
from expertmesh.config.plugins import Plugins
from expertmesh.config.run import RunConfig, with_fitting_warmup
from expertmesh.config.values import shown
from expertmesh.errors import ConfigError, command
from expertmesh.models.family import Family
from expertmesh.models.gpt.family import GPT

ENTRY_POINTS = "expertmesh.families"
"""Group of entry points by which a package adds a family: its name, and the place of its `Family`."""
FAMILIES: Plugins[Family] = Plugins(
    "family",
    Family,
    ENTRY_POINTS,
    {
        GPT.name: GPT,
        "seq2seq": "expertmesh_families.seq2seq.family:SEQ2SEQ",
        "swin": "expertmesh_families.swin.family:SWIN",
    },
)
"""The families that are known by name."""

DEFAULT = GPT
"""The default family."""


def find_family(name: str) -> Family:
    """A known family by its name, or any family by "module:name"; the working directory is searched for modules,
    too."""
    module, colon, attribute = name.partition(":")
    if not colon:
        if name in FAMILIES.names:
            return FAMILIES[name]
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
        A frozen `expertmesh.RunConfig` of the recipe's family, to train with `expertmesh.train`. The `model` of a GPT
        recipe builds an `expertmesh.GPT`.

    Raises:
        ConfigError: there is no such recipe or option, or a value breaks a rule.

    Example:
        >>> config = em.recipe("gpt-moe-demo", {"train.steps": 20, "model.moe.top_k": 1})
        >>> config.model.moe.num_experts, config.optim.warmup_steps
        ((32,), 1)
    """
    owners = recipe_owners()
    if name not in owners:
        near = difflib.get_close_matches(str(name), owners, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(owners)}"
        raise ConfigError(f"recipe={shown(name)}: unknown recipe; {hint}{absent_families()}")
    family = owners[name]
    default = family.find_recipes()[name]().model_copy(update={"family": family.name})
    return changed(default, changes or {})


def recipe_owners() -> dict[str, Family]:
    """Known families by the names of their recipes; of two that give one the same name, the first."""
    owners: dict[str, Family] = {}
    for family in FAMILIES.values():
        with suppress(ConfigError):  # its recipes cannot be imported
            for name in family.find_recipes() if family.recipes is not None else ():
                owners.setdefault(name, family)
    return owners


def absent_families() -> str:
    """End of a message about an unknown recipe that names the families that cannot be imported; "" if there are
    none."""
    absent = [name for name in FAMILIES.names if name not in FAMILIES]
    why = command(f"train --family {absent[0]}") if absent else ""
    return f"; not imported: {', '.join(absent)} ({why} says why)" if absent else ""


def changed(default: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A validated copy of a configuration."""
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes={shown(changes)}: must be options and their values; for example {{'train.steps': 20}}"
        )
    flat = flat_changes(default, changes)
    return default.updated(with_fitting_warmup(default, flat))
