"""Balance losses and the z-loss where their values are known; in general they are compared with the oracle (test_exactness.py)."""

import pytest
import torch

from expertmesh import MoELayer
from expertmesh.testing.numerics import assert_close_fp64, assert_differs

T, E = 30, 5


def layer_with(**kwargs):
    options = {"dim": 6, "hidden_dim": 4, "num_experts": E, "top_k": 2, "seed": 0} | kwargs
    return MoELayer(dtype=torch.float64, **options)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize("top_k", [1, 3, E])
def test_uniform_routing_gives_the_weight(top_k, score_function):
    layer = layer_with(top_k=top_k, score_function=score_function, aux_loss_weight=0.125)
    torch.nn.init.zeros_(layer.router.proj.weight)
    x = torch.randn(T, 6, dtype=torch.float64)
    one = torch.tensor(1.0, dtype=torch.float64)
    assert_close_fp64(layer(x)[1].aux_loss, 0.125 * one, what="uniform scores")
    balanced = layer_with(top_k=E, aux_loss_weight=0.125)
    assert_close_fp64(balanced(x)[1].aux_loss, 0.125 * one, what="uniform choices")


def test_importance_and_load_are_zero_when_uniform():
    layer = layer_with(top_k=E, balance_loss="importance_load")
    torch.nn.init.zeros_(layer.router.proj.weight)
    loss = layer(torch.randn(T, 6, dtype=torch.float64))[1].aux_loss
    assert_close_fp64(loss, 0.0, what="loss", scale=1.0)


def test_collapsed_routing_is_worst():
    layer = layer_with(top_k=1, aux_loss_weight=1.0)
    with torch.no_grad():
        layer.router.proj.weight.zero_()[2] = 50.0
    x = torch.rand(T, 6, dtype=torch.float64) + 0.5
    assert_close_fp64(layer(x)[1].aux_loss, torch.tensor(float(E)), what="all on one expert")


def test_weights_and_kinds():
    x = torch.randn(T, 6, dtype=torch.float64)
    one = layer_with(aux_loss_weight=1.0, z_loss_weight=1.0)(x)[1]
    scaled = layer_with(aux_loss_weight=0.5, z_loss_weight=0.25)(x)[1]
    assert_close_fp64(scaled.aux_loss, 0.5 * one.aux_loss, what="aux")
    assert_close_fp64(scaled.z_loss, 0.25 * one.z_loss, what="z")
    assert layer_with(balance_loss="none")(x)[1].aux_loss == 0
    nothing = layer_with(aux_loss_weight=0.0)(x)[1]
    nothing.z_loss.add_(1.0)
    assert nothing.aux_loss == 0, "not the same tensor"


@pytest.mark.parametrize("balance_loss", ["switch", "importance_load"])
def test_no_valid_token_gives_zero_and_finite_gradients(balance_loss):
    layer = layer_with(balance_loss=balance_loss, z_loss_weight=1.0, routing_group_size=3)
    for x, mask in (
        (torch.zeros(0, 6, dtype=torch.float64), None),
        (torch.zeros(0, 6, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)),
        (torch.randn(8, 6, dtype=torch.float64), torch.zeros(8, dtype=torch.bool)),
    ):
        y, stats = layer(x, token_mask=mask)
        assert stats.aux_loss == 0 and stats.z_loss == 0 and y.abs().sum() == 0
        layer.zero_grad()
        (y.sum() + stats.aux_loss + stats.z_loss).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def cv_squared(values):
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2


@pytest.mark.parametrize("noise", ["none", "gaussian", "gumbel"])
def test_only_gaussian_noise_gives_the_load_a_gradient(noise):
    layer = layer_with(balance_loss="importance_load", router_noise=noise, aux_loss_weight=1.0)
    x = torch.randn(T, 6, dtype=torch.float64)
    routed = layer(x)[1]
    scores = (x @ layer.router.proj.weight.t()).softmax(-1)
    importance = cv_squared(list(scores.sum(0))) / 2
    gradient = [
        torch.autograd.grad(v, layer.router.proj.weight)[0] for v in (routed.aux_loss, importance)
    ]
    if noise == "gaussian":
        assert_differs(*gradient, what="the load has a gradient")
    else:
        assert_close_fp64(*gradient, what="importance only")
