"""Activations with routing weights in one operator: against PyTorch's own in FP64, by the two-times rule."""

import pytest
import torch
from tests.oracle import numerics

from expertmesh.ops.activation import activate, num_branches
from expertmesh.ops.cpu.activation_passes import BLOCK_ELEMENTS
from expertmesh.ops.experts.weighted_activation import weighted_activation

F = 13


def plain(h, s, activation):
    a = activate(h.unflatten(1, (num_branches(activation), F)), activation)
    return (a * s[:, None]).to(h.dtype)


def results(compute, h, s, grad, activation):
    h, s = h.clone().requires_grad_(), s.clone().requires_grad_()
    a = compute(h, s, activation)
    a.backward(grad)
    return {"a": a.detach(), "h": h.grad, "s": s.grad}


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "gelu", "relu2", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("R", [0, 1, BLOCK_ELEMENTS // F + 3])
def test_against_plain_operators(activation, dtype, R):
    h = torch.randn(R, num_branches(activation) * F).to(dtype)
    s, grad = torch.rand(R).to(dtype), torch.randn(R, F).to(dtype)

    def ours(h, s, activation):
        return weighted_activation(h, s, activation=activation)

    oracle = results(plain, h.double(), s.double(), grad.double(), activation)
    theirs = results(plain, h, s, grad, activation)
    found = results(ours, h, s, grad, activation)
    for what in oracle:
        assert found[what].dtype == dtype
        numerics.assert_two_times(found[what], theirs[what], oracle[what], what=what)


def test_no_second_derivative():
    h = torch.randn(3, 2 * F, requires_grad=True)
    a = weighted_activation(h, torch.ones(3), activation="swiglu")
    (grad,) = torch.autograd.grad(a.sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
