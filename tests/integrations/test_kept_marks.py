"""Marks of experts' parameters, by which engines and optimizers know them, in copies of the doors' layers."""

import copy

import pytest
import torch
from torch import nn

from expertmesh.integrations import deepspeed, tutel

EXPERTS = {
    "ffn": {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8},
    "other": {
        "type": "ffn",
        "num_experts_per_device": 2,
        "hidden_size_per_expert": 8,
        "output_dim": 4,
        "activation_fn": torch.sin,
    },
}
LAYERS = {
    "DeepSpeed, grouped": lambda: deepspeed.MoE(
        4, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), num_experts=2
    ),
    "DeepSpeed, modules": lambda: deepspeed.MoE(4, nn.Linear(4, 4), num_experts=2),
    **{
        f"Tutel, {name}": lambda experts=experts: tutel.moe_layer(
            {"type": "top", "k": 1},
            4,
            experts,
            scan_expert_func=lambda _, p: setattr(p, "skip_allreduce", True),
        )
        for name, experts in EXPERTS.items()
    },
}


def assigned(net, state=None, device="cpu"):
    """The net after a state dict of other values has taken the place of its parameters."""
    state = {n: v + 1 if v.is_floating_point() else v.clone() for n, v in (state or net.state_dict()).items()}
    net.to(device).load_state_dict(state, assign=True)
    found = net.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    return net


WAYS = {
    "deepcopy": copy.deepcopy,
    "average": lambda net: torch.optim.swa_utils.AveragedModel(net).module,
    "meta": lambda net: net.to("meta"),
    "dtype": lambda net: net.to(torch.float64),
    "to_empty": lambda net: net.to_empty(device="cpu"),
    "assign": assigned,
    "assign to meta": lambda net: assigned(net, net.state_dict(), "meta"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYERS)
def test_experts_are_known_in_copies(kind, way):
    net = nn.Sequential(nn.Linear(4, 4), LAYERS[kind]())
    net(torch.randn(3, 4))
    marks = {name: dict(p.__dict__) for name, p in net.named_parameters()}
    assert any(marks.values())
    made = WAYS[way](net)
    assert {name: dict(p.__dict__) for name, p in made.named_parameters()} == marks
