"""The examples in docstrings run and give what they say; those of `expertmesh` itself are in test_python_api.py."""

import doctest
import importlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import expertmesh
from expertmesh import functional

MODULES = [
    "integrations.deepspeed.door",
    "integrations.deepspeed.optimizer_groups",
    "integrations.fairseq",
    "integrations.tutel.moe_layer",
    "integrations.tutel.net",
    "integrations.tutel.padded",
    "integrations.tutel.system",
    "moe.capacity",
    "moe.checkpointing",
    "moe.losses",
    "moe.match_mlp",
    "moe.warm_up",
    "ops.experts.moe_mlp",
    "ops.experts.weights",
    "ops.permute",
    "ops.route_metadata",
    "ops.topk",
]
FEWEST_NAMES = 20


def examples(module):
    """Docstrings of a module that have examples, run where a user would have imported what they name."""
    shared = {name: getattr(functional, name) for name in functional.__all__}
    shared |= {name: getattr(expertmesh, name) for name in ("ConfigError", "MoELayer")}
    shared |= {"torch": torch, "nn": nn, "checkpoint": checkpoint}
    found = doctest.DocTestFinder().find(module, globs=shared | vars(module))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    torch.manual_seed(0)
    found = examples(importlib.import_module(f"expertmesh.{name}"))
    assert found
    for test in found:
        said = []
        failed, _ = doctest.DocTestRunner().run(test, out=said.append)
        assert not failed, "".join(said)


def test_names_that_users_meet_have_examples():
    modules = [importlib.import_module(f"expertmesh.{name}") for name in MODULES]
    found = sum(len(examples(module)) for module in modules)
    assert found + len(expertmesh.__all__) >= FEWEST_NAMES
