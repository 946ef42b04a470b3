"""What is recognised as a feed-forward block, and what is not although it looks like one."""

from typing import ClassVar, get_args

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from torch import nn
from torch.nn import functional as F

from expertmesh.config.moe_rules import Activation
from expertmesh.moe.match_mlp import PROBED, match_activation, match_mlp
from expertmesh.ops.activation import activate, num_branches


class Gated(nn.Module):
    """A gated block with names of its own; the gate is the second linear map."""

    def __init__(self, act, bias):
        super().__init__()
        self.act = act
        self.value, self.door = nn.Linear(6, 10, bias=bias), nn.Linear(6, 10, bias=bias)
        self.back = nn.Linear(10, 6, bias=bias)

    def forward(self, x):
        return self.back(self.act(self.door(x)) * self.value(x))


class Other(nn.Module):
    """Two linear maps of the right shapes, and something else between or around them."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.fc1, self.fc2 = kind, nn.Linear(6, 10), nn.Linear(10, 6)
        self.dropout = nn.Dropout(0.1 if kind == "dropout" else 0.0)
        if kind == "norm":
            self.norm = nn.LayerNorm(10)
        if kind == "buffer":
            self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if self.kind == "host":
            return self.fc2(F.relu(self.fc1(x))).numpy()
        h = F.gelu(self.fc1(x), approximate="tanh") if self.kind == "tanh" else F.relu(self.fc1(x))
        y = self.fc2(self.dropout(self.norm(h) if self.kind == "norm" else h))
        return x + y if self.kind == "skip" else 1.0001 * y if self.kind == "scaled" else y


FUNCTIONS = {
    "silu": nn.SiLU(),
    "gelu": F.gelu,
    "relu": torch.relu,
    "relu2": lambda h: F.relu(h) ** 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations(name):
    assert match_activation(FUNCTIONS[name]) == name


@pytest.mark.parametrize(
    "function",
    [nn.GELU("tanh"), torch.sigmoid, lambda h: 3, lambda h: h[:2], F.leaky_relu, nn.Linear(2, 2)],
)
def test_unknown_activations(function):
    assert match_activation(function) is None


def test_a_clamped_block_is_not_recognized():
    """It differs from one without the clamp beyond 7 alone, which no probe reaches."""
    assert set(get_args(Activation)) - set(PROBED) == {"clamped_swiglu"}
    block = Gated(lambda h: h * torch.sigmoid(1.702 * h), bias=True)
    with torch.no_grad():
        block.value.bias += 1
    assert match_mlp(block) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", PROBED)
def test_blocks(activation, bias):
    branches = num_branches(activation)
    plain = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}.get(activation, activation)
    act = FUNCTIONS[plain]
    if branches == 2:
        block = Gated(act, bias).double()
    else:
        layers = nn.ModuleList([nn.Linear(6, 10, bias=bias), nn.Linear(10, 6, bias=bias)])
        block = Plain(layers, act).double()
    found = match_mlp(block)
    assert (found.activation, found.dim, found.hidden_dim, found.bias) == (activation, 6, 10, bias)
    w_in, w_out, b_in, b_out = found.weights(block)
    x_TD = torch.randn(5, 6, dtype=torch.float64)
    h_TGF = torch.einsum("td,gfd->tgf", x_TD, w_in) + (0 if b_in is None else b_in)
    y_TD = activate(h_TGF, activation) @ w_out.T + (0 if b_out is None else b_out)
    assert_close_fp64(y_TD, block(x_TD).detach(), what="the block from its weights")


class Plain(nn.Module):
    def __init__(self, layers, act):
        super().__init__()
        self.layers, self.act = layers, act

    def forward(self, x):
        return self.layers[1](self.act(self.layers[0](x)))


def test_missing_biases_are_zero():
    block = nn.Sequential(nn.Linear(6, 10, bias=False), nn.ReLU(), nn.Linear(10, 6))
    _, _, b_in, b_out = match_mlp(block).weights(block)
    assert torch.equal(b_in, torch.zeros(1, 10))
    assert torch.equal(b_out, block[2].bias)


@pytest.mark.parametrize("kind", ["tanh", "skip", "scaled", "norm", "buffer", "dropout", "host"])
def test_what_only_looks_like_a_block(kind):
    assert match_mlp(Other("plain")) is not None
    assert match_mlp(Other(kind)) is None


def test_hooks_and_meta_weights_are_not_looked_through():
    block = Other("plain")
    block.fc1.register_forward_hook(lambda m, args, out: out + 1)
    assert match_mlp(block) is None
    assert match_mlp(Other("plain").to("meta")) is None


def test_the_module_is_left_alone():
    block = Other("plain").train()
    before = {k: v.clone() for k, v in block.state_dict().items()}
    match_mlp(block)
    assert block.training
    assert all(torch.equal(before[k], v) for k, v in block.state_dict().items())


def test_a_module_is_asked_once_for_each_width():
    class Counted(nn.Sequential):
        widths: ClassVar[list[int]] = []

        def forward(self, x):
            self.widths.append(x.shape[1])
            return super().forward(x)

    assert match_mlp(Counted(nn.Linear(8, 12), nn.SELU(), nn.Linear(12, 8))) is None
    assert sorted(Counted.widths) == [8, 12]  # both maps may be the first one
