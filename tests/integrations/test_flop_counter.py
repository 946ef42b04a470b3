"""PyTorch's FLOP counter beside a count by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import expertmesh.integrations.flop_counter  # noqa: F401
from expertmesh import MoELayer
from expertmesh.ops.experts import native
from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.ops.experts.grouped_linear import grouped_linear

T, D, F, E, K = 24, 16, 12, 4, 2
PRODUCT = 2 * T * K * D * F  # of all rows with one matrix of their experts
ROUTER = 2 * T * D * E
OFFSETS = torch.tensor([0, 10, 10, 30, T * K], dtype=torch.int32)


def layer(**options: object) -> MoELayer:
    return MoELayer(dim=D, num_experts=E, top_k=K, hidden_dim=F, **options)


def counted(step: object) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("activation", "matrices"), [("swiglu", 3), ("gelu", 2)])
@pytest.mark.parametrize("options", [{}, {"recompute_h": True}])
def test_a_step_of_the_layer(activation: str, matrices: int, options: dict[str, object]) -> None:
    moe = layer(activation=activation, **options)
    x_TD = torch.randn(T, D, requires_grad=True)
    again = (matrices - 1) * PRODUCT if options else 0
    forward = matrices * PRODUCT + ROUTER
    assert counted(lambda: moe(x_TD)[0].sum().backward()) == 3 * forward + again


def test_a_step_that_no_batch_changes() -> None:
    moe = layer(activation="gelu", batch_invariant=True).eval()
    x_TD = torch.randn(T, D, requires_grad=True)
    # sums of the router's forward are no matrix products; without kernels that keep the first ones, the experts'
    # backward computes them again
    forward = 2 * PRODUCT + ROUTER
    again = 0 if native.is_loaded() else PRODUCT
    assert counted(lambda: moe(x_TD)[0].sum().backward()) == 3 * forward - ROUTER + again


def test_what_needs_no_gradient_is_not_counted() -> None:
    moe = layer(activation="gelu")
    moe.requires_grad_(False)
    x_TD = torch.randn(T, D, requires_grad=True)
    assert counted(lambda: moe(x_TD)[0].sum().backward()) == 2 * (2 * PRODUCT + ROUTER)


def test_without_gradients() -> None:
    moe = layer(activation="gelu")
    x_TD = torch.randn(T, D)

    def step() -> None:
        with torch.no_grad():
            moe(x_TD)

    assert counted(step) == 2 * PRODUCT + ROUTER


def test_linear_maps_by_expert() -> None:
    x, w = torch.randn(T * K, D, requires_grad=True), torch.randn(E, F, D, requires_grad=True)
    assert counted(lambda: grouped_linear(x, w, OFFSETS).sum().backward()) == 3 * PRODUCT


def test_adapters() -> None:
    rank = 2
    x, w = torch.randn(T * K, D, requires_grad=True), torch.randn(E, F, D)
    a = torch.randn(E, rank, D, requires_grad=True)
    b = torch.randn(E, F, rank, requires_grad=True)
    thin = 2 * T * K * rank * (D + F)
    found = counted(lambda: adapted_linear(x, w, OFFSETS, a, b, 1.0).sum().backward())
    assert found == 2 * PRODUCT + 3 * thin
