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
WAYS = {
    "deepcopy": copy.deepcopy,
    "average": lambda net: torch.optim.swa_utils.AveragedModel(net).module,
    "meta": lambda net: net.to("meta"),
    "dtype": lambda net: net.to(torch.float64),
    "to_empty": lambda net: net.to_empty(device="cpu"),
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
