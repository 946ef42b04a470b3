"""Balance losses and the z-loss where their values are known; in general they are compared with the oracle
(test_exactness.py)."""

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64

from expertmesh import ConfigError, MoELayer
from expertmesh.functional import count_choices, importance_load_loss, router_z_loss, switch_loss

T, E = 30, 5


def layer_with(**kwargs):
    options = {"dim": 6, "hidden_dim": 4, "num_experts": E, "top_k": 2, "seed": 0} | kwargs
    return MoELayer(dtype=torch.float64, **options)


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


def test_two_losses_of_zero_are_two_tensors():
    x = torch.randn(T, 6, dtype=torch.float64)
    nothing = layer_with(aux_loss_weight=0.0)(x)[1]
    nothing.z_loss.add_(1.0)
    assert nothing.aux_loss == 0


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


@pytest.mark.parametrize("loss", [switch_loss, importance_load_loss])
@pytest.mark.parametrize(("counted", "given"), [(7, None), (None, 7)])
def test_choices_of_other_groups_are_refused(loss, counted, given):
    scores, choices = torch.rand(T, E), count_choices(torch.randint(E, (T, 2)), E, counted)
    with pytest.raises(ConfigError, match=f"group_size={given}.*must be equally many"):
        loss(scores, choices, group_size=given)


LONG = torch.ones(T + 1, dtype=torch.bool)
MISFITS = {
    "fewer experts": (lambda s, n: switch_loss(s, n[:, 1:]), "num_choices has shape"),
    "fewer experts of importance": (lambda s, n: importance_load_loss(s, n[:, 1:]), "num_choices"),
    "a longer mask": (lambda s, n: switch_loss(s, n, token_mask_T=LONG), "token_mask has shape"),
    "a longer mask of logits": (lambda s, n: router_z_loss(s, token_mask_T=LONG), "token_mask has"),
    "a mask of numbers": (lambda s, n: router_z_loss(s, token_mask_T=LONG[1:].long()), "int64"),
    "an id too large": (
        lambda s, n: count_choices(n + E + 1, E, 1),
        "expert_ids holds .*; it must be from 0 to",
    ),
    "a negative id": (
        lambda s, n: count_choices(n - E * T, E, None),
        "expert_ids holds .*; it must be from 0 to",
    ),
    "ids of floats": (lambda s, n: count_choices(s, E, None), "expert_ids has dtype"),
    "ids of one axis": (lambda s, n: count_choices(n[0], E, None), "expert_ids has shape"),
}


@pytest.mark.parametrize(("call", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_one_line(call, words):
    scores, choices = torch.rand(T, E), torch.ones(1, E, dtype=torch.int64)
    with pytest.raises(ConfigError, match=words) as caught:
        call(scores, choices)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
