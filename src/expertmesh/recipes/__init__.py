"""Recipes: functions that return a complete GPTRunConfig. Importing them does not import torch."""

from collections.abc import Callable

from expertmesh.config.gpt import GPTRunConfig
from expertmesh.recipes.gpt_demo import gpt_dense_demo, gpt_moe_demo, gpt_moe_test
from expertmesh.recipes.gpt_published import PUBLISHED, gpt_moe_1b
from expertmesh.recipes.gpt_students import gpt_mos_demo, gpt_prmoe_demo

RECIPES: dict[str, Callable[[], GPTRunConfig]] = {
    "gpt-moe-test": gpt_moe_test,
    "gpt-moe-demo": gpt_moe_demo,
    "gpt-dense-demo": gpt_dense_demo,
    "gpt-prmoe-demo": gpt_prmoe_demo,
    "gpt-mos-demo": gpt_mos_demo,
    "gpt-moe-1b": gpt_moe_1b,
    **{recipe.name: recipe for recipe in PUBLISHED},
}
