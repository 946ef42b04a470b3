"""The spec of a family says what its models consist of: names, order, shapes, what optimizers and initial weights do
with each."""

import math

import pytest
import torch
from tests.support.known_rows import known

from expertmesh.config.moe import MoEConfig
from expertmesh.models.registry import FAMILIES, find_family
from expertmesh.moe.layer import MoELayer
from expertmesh.spec.model_spec import LEARNED_AS, Parameter, parameter
from expertmesh.training.param_groups import parameter_roles

_EXPERTS = {"num_experts": (4,), "top_k": 1}
OPTIONS = known(
    {
        "gpt-moe-test": [
            {"model.tie_embeddings": False, "model.qkv_bias": True, "model.qk_norm": True},
            {"model.moe": {**_EXPERTS, "num_shared_experts": 1, "shared_gate": True, "bias": True}},
            {"model.moe": {**_EXPERTS, "router": "cosine", "cosine_dim": 8, "residual": True}},
            {"model.moe": {"num_experts": ()}},
        ],
        "translate-test": [
            {"model.tie_embeddings": False, "model.positions": "untied"},
            {"model.moe": {**_EXPERTS, "residual": True, "bias": True}},
        ],
        "swin-test": [
            {"model.variant": "released"},
            {
                "model.moe": {
                    **_EXPERTS,
                    "router": "cosine",
                    "num_shared_experts": 1,
                    "shared_gate": True,
                }
            },
            {"model.moe": {**_EXPERTS, "router": "hash", "residual": True}},
        ],
    }
)
RECIPES = {name: make for one in FAMILIES.values() for name, make in one.find_recipes().items()}
CASES = [(name, {}) for name in RECIPES] + [(n, o) for n, many in OPTIONS.items() for o in many]


def built(recipe, options, *, device="meta"):
    config = RECIPES[recipe]().updated(options)
    return find_family(config.family).open_task(config).builder.build(device=device, dtype=torch.float32)


@pytest.mark.parametrize(("recipe", "options"), CASES, ids=str)
def test_every_parameter_is_in_the_spec(recipe, options):
    model = built(recipe, options)
    found = [(one.name, one.shape) for one in model.spec]
    assert found == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert all(len(one.axes) == len(one.shape) for one in model.spec)
    stacked = {
        f"{name}.experts.{leaf}"
        for name, layer in model.named_modules()
        if isinstance(layer, MoELayer)
        for leaf, _ in layer.experts.named_parameters()
    }
    assert {one.name for one in model.spec if one.is_expert} == stacked


@pytest.mark.parametrize(("recipe", "options"), CASES, ids=str)
def test_optimizers_see_in_modules_what_the_spec_says(recipe, options):
    """Models of others have no spec, and what is seen in their modules must be right for ours, too."""
    model = built(recipe, options)
    said = {one.name: one.learned_as for one in model.spec}
    assert parameter_roles(model) == said
    if recipe.startswith("swin"):  # its head and patches are linear maps like others
        return
    blind = torch.nn.Module()
    for name, child in model.named_children():
        blind.add_module(name, child)
    seen = parameter_roles(blind)
    tables = {name for name, role in said.items() if role == "table"}
    assert {name: seen[name] for name in said if name not in tables} == {
        name: role for name, role in said.items() if name not in tables
    }


@pytest.mark.parametrize(("recipe", "options"), [(n, o) for n, many in OPTIONS.items() for o in many])
def test_initial_weights_are_those_of_the_spec(recipe, options):
    model = built(recipe, options, device="cpu")
    for name, p in model.named_parameters():
        said = model.spec.by_name[name]
        if said.role == "scale" and ".moe." in name:
            assert p.item() == pytest.approx(math.log(2))
        elif said.first_value is None:
            assert p.std() > 0, name
        else:
            assert (p == torch.tensor(said.first_value)).all(), name


def test_names_sizes_and_places_of_a_parameter():
    one = parameter(
        "w_in",
        "matrix",
        "experts",
        expert=4,
        branch=2,
        hidden=6,
        model=8,
        cut="hidden",
        hub=("a.{expert}", "b.{expert}"),
    )
    inside = one.inside("layers.3.moe.", "model.layers.3.", layer=3)
    assert inside == Parameter(
        "layers.3.moe.w_in",
        (4, 2, 6, 8),
        ("expert", "branch", "hidden", "model"),
        "matrix",
        "experts",
        layer=3,
        cut="hidden",
        hub=("model.layers.3.a.{expert}", "model.layers.3.b.{expert}"),
    )
    assert (inside.num_elements, inside.tensor_axis, inside.expert_axis) == (4 * 2 * 6 * 8, 2, 0)
    assert set(LEARNED_AS.values()) == {"table", "edge", "matrix", "vector"}


def test_active_parameters_are_those_of_k_experts():
    options = {"model.moe": MoEConfig(num_experts=(4,), top_k=3).model_dump()}
    spec = built("gpt-moe-test", options).spec
    experts = spec.count("experts")
    assert spec.num_parameters - spec.num_active == experts // 4 and experts
    all_of_them = {"model.moe": MoEConfig(num_experts=(2,), top_k=2).model_dump()}
    assert built("gpt-moe-test", all_of_them).spec.num_inactive == 0
