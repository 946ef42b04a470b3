"""Activations with routing weights in one operator: against PyTorch's own in FP64, by the two-times rule."""

import pytest
import torch
from tests.oracle import numerics
from tests.support.launches import recorded_launches

from expertmesh.kernels import activated_rows as kernels
from expertmesh.ops.activation import activate, inner_name, num_branches
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


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [("auto", R) for R in (0, 1, BLOCK_ELEMENTS // F + 3)] + [("triton", R) for R in (0, 131)]


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "reglu", "gelu", "relu2", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("backend", "R"), CASES)
def test_against_plain_operators(activation, dtype, backend, R):
    h = torch.randn(R, num_branches(activation) * F).to(DEVICE, dtype)
    s, grad = torch.rand(R).to(DEVICE, dtype), torch.randn(R, F).to(DEVICE, dtype)

    def ours(h, s, activation):
        return weighted_activation(h, s, activation=activation, backend=backend)

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


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_built(target, activation):
    h = torch.empty(4096, num_branches(activation) * 768, dtype=torch.bfloat16, device="meta")
    s_R = torch.empty(4096, device="meta")
    words = {"num_branches": num_branches(activation), "inner": inner_name(activation)}
    with recorded_launches(kernels) as launches:
        kernels.backward(kernels.forward(h, s_R, **words), h, s_R, **words)
    assert [launch.name for launch in launches] == ["activated", "activated_backward"]
    for launch in launches:
        assert launch.build(target).spill_bytes == 0
