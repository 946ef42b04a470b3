"""Balance losses and the z-loss against formulas written out, their normalisation, scope and gradients."""

import math

import pytest
import torch

from expertmesh import MoELayer
from expertmesh.moe.assignment import count_choices
from expertmesh.moe.losses import importance_load_loss, router_z_loss, switch_loss
from expertmesh.testing.numerics import assert_close_fp64, assert_differs

T, E = 30, 5


def scores_and_ids(top_k=2):
    scores = torch.randn(T, E, dtype=torch.float64).softmax(-1).requires_grad_()
    return scores, scores.topk(top_k).indices


def by_group(mask, group_size):
    """Valid tokens of each group that has any, with their share of all valid tokens."""
    groups = [[t for t in part if mask[t]] for part in torch.arange(T).split(group_size or T)]
    total = sum(len(g) for g in groups)
    return [(g, len(g) / total) for g in groups if g]


def switch_by_loop(scores, ids, mask, group_size):
    total = 0.0
    for members, share in by_group(mask, group_size):
        for e in range(E):
            fraction = sum((ids[t] == e).sum().item() for t in members) / (
                len(members) * ids.shape[1]
            )
            total += share * E * fraction * sum(scores[t, e] for t in members) / len(members)
    return total


def cv_squared(values):
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values) / mean**2


@pytest.mark.parametrize("top_k", [1, 2, E])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group_size", [None, 7, 10])
def test_switch_loss(group_size, masked, top_k):
    scores, ids = scores_and_ids(top_k)
    mask = torch.rand(T) > 0.4 if masked else torch.ones(T, dtype=torch.bool)
    hidden = torch.where(mask[:, None], ids, E)
    loss = switch_loss(
        scores,
        count_choices(hidden, E, group_size),
        token_mask_T=mask if masked else None,
        group_size=group_size,
    )
    expected = switch_by_loop(scores, ids, mask, group_size)
    assert_close_fp64(loss, expected, what="loss")
    ours, theirs = (torch.autograd.grad(v, scores)[0] for v in (loss, expected))
    assert_close_fp64(ours, theirs, what="gradient")


@pytest.mark.parametrize("with_load", [False, True])
@pytest.mark.parametrize("group_size", [None, 7])
def test_importance_and_load_loss(group_size, with_load):
    scores, ids = scores_and_ids()
    load = torch.rand(T, E, dtype=torch.float64) if with_load else None
    mask = torch.rand(T) > 0.4
    loss = importance_load_loss(
        scores,
        count_choices(torch.where(mask[:, None], ids, E), E, group_size),
        load_TE=load,
        token_mask_T=mask,
        group_size=group_size,
    )
    expected = 0.0
    for members, share in by_group(mask, group_size):
        importance = [sum(scores[t, e] for t in members) for e in range(E)]
        if with_load:
            loads = [sum(load[t, e] for t in members) for e in range(E)]
        else:
            loads = [sum((ids[t] == e).sum().item() for t in members) for e in range(E)]
        expected += share * (cv_squared(importance) + cv_squared(loads)) / 2
    assert_close_fp64(loss, expected, what="loss")
    ours, theirs = (torch.autograd.grad(v, scores)[0] for v in (loss, expected))
    assert_close_fp64(ours, theirs, what="gradient")


def test_z_loss():
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(T) > 0.4
    loss = router_z_loss(logits, token_mask_T=mask)
    rows = [math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits[mask].tolist()]
    assert_close_fp64(loss, sum(rows) / len(rows), what="loss")
    assert torch.autograd.grad(loss, logits)[0][~mask].abs().sum() == 0


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


@pytest.mark.parametrize("balance_loss", ["switch", "importance_load"])
def test_scope_and_groups(balance_loss):
    kwargs = {"balance_loss": balance_loss, "routing_group_size": 8}
    x = torch.randn(T, 6, dtype=torch.float64)
    groups, whole = layer_with(**kwargs), layer_with(balance_loss_scope="global", **kwargs)
    parts = [(len(p), groups(p)[1].aux_loss) for p in x.split(8)]
    assert_close_fp64(
        groups(x)[1].aux_loss, sum(n * v for n, v in parts) / T, what="mean of groups"
    )
    ungrouped = layer_with(balance_loss=balance_loss)
    assert_close_fp64(whole(x)[1].aux_loss, ungrouped(x)[1].aux_loss, what="one group")
    assert_differs(whole(x)[1].aux_loss, groups(x)[1].aux_loss, what="scope")


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


def test_losses_ignore_masked_tokens_and_dropping():
    x, mask = torch.randn(T, 6, dtype=torch.float64), torch.rand(T) > 0.5
    layer = layer_with(z_loss_weight=0.1)
    masked, alone = layer(x, token_mask=mask)[1], layer(x[mask])[1]
    for name in ("aux_loss", "z_loss"):
        assert_close_fp64(getattr(masked, name), getattr(alone, name).detach(), what=name)
    assert torch.equal(masked.num_tokens_per_expert_E, alone.num_tokens_per_expert_E)
    tight = layer_with(z_loss_weight=0.1, capacity_factor=0.2, min_capacity=1)
    assert torch.equal(tight(x)[1].aux_loss, layer(x)[1].aux_loss)
    assert torch.equal(tight(x)[1].num_tokens_per_expert_E, layer(x)[1].num_tokens_per_expert_E)


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
