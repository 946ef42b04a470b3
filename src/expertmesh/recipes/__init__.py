"""Recipes: functions that return a complete RunConfig. Importing them does not import torch."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from expertmesh.config.base import shown
from expertmesh.config.family import FAMILIES
from expertmesh.config.gpt import GPTRunConfig
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.recipes.changes import changed
from expertmesh.recipes.gpt_demo import gpt_dense_demo, gpt_moe_demo, gpt_moe_test
from expertmesh.recipes.gpt_published import PUBLISHED, gpt_moe_1b
from expertmesh.recipes.gpt_scale import LARGE
from expertmesh.recipes.gpt_students import gpt_mos_demo, gpt_prmoe_demo

RECIPES: dict[str, Callable[[], GPTRunConfig]] = {
    "gpt-moe-test": gpt_moe_test,
    "gpt-moe-demo": gpt_moe_demo,
    "gpt-dense-demo": gpt_dense_demo,
    "gpt-prmoe-demo": gpt_prmoe_demo,
    "gpt-mos-demo": gpt_mos_demo,
    "gpt-moe-1b": gpt_moe_1b,
    **{recipe.name: recipe for recipe in (*PUBLISHED, *LARGE)},
}


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The complete configuration of a recipe, with some values changed.

    Args:
        name: as `expertmesh train --help` lists them, for example "gpt-moe-demo".
        changes: new values by the dotted names of the command line's options, or in sections
            (`{"train": {"steps": 20}}`). A warm-up that does not fit into fewer steps is shortened with them.

    Returns:
        A frozen `expertmesh.RunConfig` of the recipe's family, to train with `expertmesh.train`; the `model` of one for text
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
