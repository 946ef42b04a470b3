"""Every name of `deepspeed.moe` is served by the door, or refused by it with the way out; groups of parameters."""

import importlib
import importlib.util
import pkgutil

import pytest
import torch
from torch import nn

from expertmesh.errors import ConfigError
from expertmesh.integrations import deepspeed as door

EVERY = [
    "MoE",
    "has_moe_layers",
    "is_moe_param",
    "split_params_into_shared_and_expert_params",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "is_moe_param_group",
    "configure_moe_param_groups",
    "multiplicative_jitter",
    "gumbel_rsample",
    "einsum",
    "top1gating",
    "top2gating",
    "topkgating",
    "TopKGate",
    "MOELayer",
    "Experts",
    "gather_tokens",
    "drop_tokens",
]
WHOLE = "layer utils sharded_moe experts mappings ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch"
WHOLE += " fused_expert_layout"
"""Modules of deepspeed.moe."""
MODULES = "layer utils sharded_moe experts mappings"
"""Public names of these modules of deepspeed.moe."""


@pytest.mark.parametrize("name", EVERY + WHOLE.split())
def test_every_name_is_served_or_refused(name):
    if f"deepspeed.moe.{name}" in door.REFUSED:
        with pytest.raises(ConfigError, match=f"^deepspeed.moe.{name} has no counterpart here; .+"):
            getattr(door, name)
    else:
        assert name in door.__all__ and callable(getattr(door, name))


def test_the_list_is_deepspeeds():
    """Public names that the modules define themselves."""
    pytest.importorskip("deepspeed", reason="deepspeed not installed")
    modules = [importlib.import_module(f"deepspeed.moe.{n}") for n in MODULES.split()]
    there = {
        name
        for module in modules
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
    }
    assert there == set(EVERY)
    package = importlib.import_module("deepspeed.moe")
    assert {m.name for m in pkgutil.iter_modules(package.__path__)} == set(WHOLE.split())


def test_the_table_refuses_only_what_is_there():
    assert door.REFUSED.keys() <= {f"deepspeed.moe.{name}" for name in [*EVERY, *WHOLE.split()]}
    with pytest.raises(AttributeError, match="no attribute 'top9gating'"):
        door.top9gating  # noqa: B018


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), door.MoE(4, nn.Linear(4, 4), num_experts=2))


def test_groups_have_every_parameter_once():
    model = net()
    assert door.has_moe_layers(model) == (True, 2) and door.has_moe_layers(nn.Linear(1, 1)) == (
        False,
        0,
    )
    shared, own = door.split_params_into_shared_and_expert_params(model.parameters())
    assert own == list(model[1]._layer.experts.parameters()) and own
    for most, parts in ((None, 1), (1, len(own)), (20, 2), (40, 1)):
        groups = door.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all", "lr": 0.1}, max_group_size=most
        )
        assert groups[0]["params"] == shared and not door.is_moe_param_group(groups[0])
        rest = [p for group in groups[1:] for p in group["params"]]
        assert [id(p) for p in rest] == [id(p) for p in own] and len(groups) == 1 + parts, most
        assert all(g["lr"] == 0.1 and g["name"] == "ep_size_1" and g["moe"] for g in groups[1:])
        torch.optim.SGD(groups, lr=0.1)
    assert door.configure_moe_param_groups(groups) is groups
    again = door.configure_moe_param_groups(list(model.parameters()))
    assert [g["name"] for g in again] == ["dense-params", "ep_size_1"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    grads = door.split_params_grads_into_shared_and_expert_params(model.parameters())
    assert [len(g) for g in grads] == [len(shared), len(own)]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed not installed")
@pytest.mark.parametrize("most", [None, 1, 20, 40])
def test_groups_are_deepspeeds(most):
    from deepspeed.moe import utils

    made = [
        module.split_params_into_different_moe_groups_for_optimizer(
            {"params": list(net().parameters()), "name": "all"}, max_group_size=most
        )
        for module in (door, utils)
    ]
    ours, theirs = ([(g["name"], len(g["params"])) for g in groups] for groups in made)
    assert ours == [group for group in theirs if group[1]]


def layer(**options):
    given = {"hidden_size": 4, "expert": nn.Linear(4, 4), "num_experts": 4} | options
    return door.MoE(**given)


LOGITS, X = torch.zeros(6, 4), torch.zeros(6, 4)
WRONG = {
    "k=0": lambda: layer(k=0),
    "k=9": lambda: layer(k=9),
    "ep_size='2'": lambda: layer(ep_size="2"),
    "ep_size=1.0": lambda: layer(ep_size=1.0),
    "ep_size=3": lambda: layer(ep_size=3),
    "one MoE per layer": lambda: layer(num_experts=[4]),
    "capacity_factor='x'": lambda: layer(capacity_factor="x", drop_tokens=False),
    "capacity_factor=None": lambda: layer(capacity_factor=None),
    "min_capacity=-1": lambda: layer(min_capacity=-1),
    "noisy_gate_policy='Foo'": lambda: layer(noisy_gate_policy="Foo"),
    "use_residual=no": lambda: layer(use_residual="no"),
    "drop_tokens=False: must": lambda: layer(drop_tokens="False"),
    "expert is a type": lambda: layer(expert=nn.Linear),
    "expert is a NoneType": lambda: layer(expert=None),
    "hidden_size=8: the expert": lambda: layer(
        hidden_size=8, expert=nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    ),
    "hidden_states is a list": lambda: layer()([[1.0] * 4]),
    "used_token is a list": lambda: layer()(X, [1] * 6),
    "used_token has 3": lambda: layer()(X, torch.ones(3)),
    "gate, k=0": lambda: door.TopKGate(4, 4, k=0),
    "gate, k=5": lambda: door.TopKGate(4, 4, k=5)(X),
    "gate, noisy_gate_policy='x'": lambda: door.TopKGate(4, 4, noisy_gate_policy="x"),
    "input of shape": lambda: door.TopKGate(4, 4)(torch.zeros(6, 5)),
    "top1, noisy_gate_policy='x'": lambda: door.top1gating(LOGITS, 1.0, 0, noisy_gate_policy="x"),
    "logits of shape (2, 6, 4)": lambda: door.top1gating(torch.zeros(2, 6, 4), 1.0, 0),
    "logits of shape (6, 4), torch.int64": lambda: door.top1gating(LOGITS.long(), 1.0, 0),
    "top1, used_token has 3": lambda: door.top1gating(LOGITS, 1.0, 0, torch.ones(3)),
    "capacity_factor=nan": lambda: door.top1gating(LOGITS, float("nan"), 0),
    "top2, capacity_factor=-1": lambda: door.top2gating(LOGITS, -1.0, 0),
    "min_capacity='0'": lambda: door.top1gating(LOGITS, 1.0, "0"),
    "k=2: must": lambda: door.top2gating(torch.zeros(6, 1), 1.0, 0),
    "k=5": lambda: door.topkgating(LOGITS, 5, 1.0, 0),
    "m is a NoneType": lambda: door.has_moe_layers(None),
    "param_groups is": lambda: door.split_params_into_different_moe_groups_for_optimizer(net()),
    "a group is": lambda: door.split_params_into_different_moe_groups_for_optimizer(list(net().parameters())),
    "model_parameters": lambda: door.configure_moe_param_groups(net().parameters()),
    "model is a dict": lambda: door.save_expert_files({}, "never-made", "a"),
    "tag='../a'": lambda: door.save_expert_files(net(), "never-made", "../a"),
}
"""What a mistake is told, after a comma if the same words come more than once."""


@pytest.mark.parametrize("words", WRONG)
def test_a_mistake_is_told_in_one_line(words):
    with pytest.raises(ConfigError) as error:
        WRONG[words]()
    told = str(error.value)
    assert words.rpartition(", ")[2].partition(":")[0] in told or words in told
    assert "\n" not in told and ";" in told


@pytest.mark.parametrize("given", [[], [3], "net"])
def test_mistakes(given):
    with pytest.raises(ConfigError, match="^model_parameters: must be"):
        door.configure_moe_param_groups(given)
    with pytest.raises(ConfigError, match="has no 'name'"):
        door.split_params_into_different_moe_groups_for_optimizer({"params": []})


def test_rsample_has_no_effect_for_two_experts_a_token():
    torch.manual_seed(0)
    expert, x = nn.Linear(4, 4), torch.randn(8, 4)
    options = {"num_experts": 4, "k": 2, "top2_2nd_expert_sampling": False}
    plain = door.MoE(4, expert, **options)
    noisy = door.MoE(4, expert, noisy_gate_policy="RSample", **options)
    noisy.load_state_dict(plain.state_dict())
    assert torch.equal(noisy(x)[0], plain(x)[0])
