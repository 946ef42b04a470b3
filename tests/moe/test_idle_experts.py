"""Experts without a token have gradients of zeros, whether they are grouped or modules of the user's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from expertmesh.moe.layer import MoELayer

D, E = 6, 5


class Sized(nn.Module):
    """Another size for each, parameters of one axis and none, and one that is frozen."""

    def __init__(self, index):
        super().__init__()
        self.first, self.second = nn.Linear(D, 3 + index), nn.Linear(3 + index, D)
        self.gain = nn.Parameter(torch.ones(()))
        self.rest = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.second(self.first(x)) * self.gain


def linear(index):
    return nn.Linear(D, D)


WAYS = {
    "plain": lambda layer, x: layer(x)[0],
    "checkpointed": lambda layer, x: checkpoint(lambda x: layer(x)[0], x, use_reentrant=False),
    "compiled": lambda layer, x: torch.compile(layer, backend="eager")(x)[0],
    "autocast": lambda layer, x: _autocast(layer, x),
}


def _autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("experts", [None, linear, Sized], ids=["grouped", "linear", "sized"])
def test_gradients_of_idle_experts_are_zeros(experts, tokens, way):
    torch.manual_seed(0)
    layer = MoELayer(dim=D, hidden_dim=4, num_experts=E, top_k=1, experts=experts, seed=0)
    x = torch.randn(tokens, D, requires_grad=True)
    WAYS[way](layer, x).sum().backward()
    learned = {n: p.grad for n, p in layer.experts.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in learned.values())
    used = {n.split(".")[0] for n, grad in learned.items() if grad.any()}
    assert len(used) == (tokens if experts else 2 * tokens)  # of the grouped, w_in and w_out
    assert x.grad is not None


def test_what_is_not_finite_in_an_idle_expert_stays_there():
    torch.manual_seed(0)
    layer = MoELayer(dim=D, hidden_dim=4, num_experts=E, top_k=1, experts=linear, seed=0)
    x = torch.randn(1, D)
    expected, stats = layer(x)
    idle = (int(stats.topk_expert_ids_TK) + 1) % E
    nn.init.constant_(layer.experts[idle].weight, torch.inf)
    y, _ = layer(x)
    y.sum().backward()
    assert torch.equal(y, expected) and not layer.experts[idle].weight.grad.any()
    with torch.no_grad():
        assert torch.equal(layer(x)[0], expected)
