"""What a token is packed into on its way through the layer, and where an option of the layer is spelled: counted."""

import ast
import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch

import expertmesh
from expertmesh import MoELayer
from expertmesh.config.moe_rules import LayerOptions
from expertmesh.kernels.cpu.library import loaded
from expertmesh.moe.types import RoutingStats
from expertmesh.ops.experts.weights import ExpertSlice, ExpertWeights

SOURCE = Path(expertmesh.__file__).parent
FOLDERS = ("moe", "ops", "parallel/experts")
WEIGHTS = {ExpertWeights.__name__, ExpertSlice.__name__, "ExpertParameters"}
"""They hold what experts know, no token."""
KERNELS = (
    "torch_forward",
    "triton_backend",
    "invariant",
    "expert_spans",
    "activation_passes",
)
"""Modules whose functions compute: what they make on the way is theirs."""


def containers():
    """Every dataclass and named tuple of the layer and its operators, by the code that makes one."""
    found = {}
    for folder in FOLDERS:
        for path in (SOURCE / folder).rglob("*.py"):
            if path.stem in KERNELS or "kernels" in path.parts or path.stem == "__init__":
                continue
            name = ".".join(("expertmesh", *path.relative_to(SOURCE).with_suffix("").parts))
            for value in vars(importlib.import_module(name)).values():
                is_data = isinstance(value, type) and value.__module__ == name
                if is_data and dataclasses.is_dataclass(value):
                    found[value.__init__.__code__] = value.__name__
                elif is_data and issubclass(value, tuple) and hasattr(value, "_fields"):
                    found[value.__new__.__code__] = value.__name__
    return found


def made_by(call):
    """Names of the containers that a call makes, in the order of their first."""
    known, found = containers(), []

    def note(frame, event, _):
        name = known.get(frame.f_code)
        if event == "call" and name is not None and name not in found:
            found.append(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def test_a_token_has_five_containers():
    layer = MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, capacity_factor=1.0, seed=0)
    x = torch.randn(24, 8, requires_grad=True)
    made = made_by(lambda: layer(x))
    assert [name for name in made if name not in WEIGHTS] == [
        "LayerCall",
        "Routing",
        "Dispatched",
        "ExpertsCall",
        "RouteMetadata",
        RoutingStats.__name__,  # the answer
    ]


@pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")
def test_decoding_needs_four():
    layer = MoELayer(dim=8, hidden_dim=16, num_experts=4, top_k=2, seed=0).eval()
    x = torch.randn(1, 8)
    with torch.no_grad():
        made = made_by(lambda: layer(x, losses=False))
    assert [name for name in made if name not in WEIGHTS] == [
        "LayerCall",
        "Routing",
        "Dispatched",
        "ExpertsCall",
        RoutingStats.__name__,
    ]


def test_an_option_is_written_in_two_places():
    """As a field of the options and as an entry of the layer's docstring; what reaches the stages is the one object
    with the fields."""
    places = {name: [] for name in LayerOptions.model_fields if not name.startswith("own_")}
    for path in [SOURCE / "config" / "moe_rules.py", *(SOURCE / "moe").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            for name in declared_by(node):
                if name in places:
                    places[name].append(path.name)
    documented = MoELayer.__doc__ or ""
    for name, files in places.items():
        # what one layer needs and a model's configuration says otherwise is a field of both
        assert set(files) == {"moe_rules.py"} and len(files) <= 2, (name, files)
        assert f"        {name}: " in documented, name


def declared_by(node):
    """Names of the options that a class has as fields, or that the layer or a class of its options is made with, one by
    one."""
    if isinstance(node, ast.ClassDef) and node.name.endswith(("Options", "Choices", "Rule")):
        return [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)]
    if isinstance(node, ast.ClassDef) and node.name == "MoELayer":
        made = next(n for n in node.body if getattr(n, "name", "") == "__init__")
        return [a.arg for a in made.args.kwonlyargs if a.arg != "router"]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "LayerOptions":
        return [k.arg for k in node.keywords if k.arg]
    return []
