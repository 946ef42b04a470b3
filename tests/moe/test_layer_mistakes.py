"""Mistakes in a MoELayer's options and arguments: each gives the value, the rule and the fix, in one line."""

import pytest
import torch
from torch import nn

from expertmesh import ConfigError, MoELayer, Routing

D, F, E = 7, 5, 6


def make(**kwargs):
    options = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": 2, "dtype": torch.float64}
    return MoELayer(**options | kwargs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": E + 1}, r"top_k=7 must be an integer from 1 to num_experts=6; lower top_k"),
        ({"top_k": 0}, "top_k=0 must be"),
        ({"top_k": 1.5}, "top_k=1.5 must be"),
        ({"top_k": True}, "top_k=True must be"),
        ({"num_experts": 0}, "num_experts=0 must be an integer of at least 1"),
        ({"dim": -4}, "dim=-4 must be"),
        ({"hidden_dim": 2.0}, "hidden_dim=2.0 must be"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0 must be a number above 0"),
        ({"capacity_factor": 0}, "capacity_factor=0 must be"),
        ({"eval_capacity_factor": float("nan")}, "eval_capacity_factor=nan must be"),
        ({"max_capacity_factor": "2"}, "max_capacity_factor='2' must be"),
        ({"min_capacity": -1}, "min_capacity=-1 must be"),
        ({"routing_group_size": 0}, "routing_group_size=0 must be"),
        ({"router": "topp"}, "did you mean 'topk'"),
        ({"score_function": "softmx"}, "did you mean 'softmax'"),
        ({"activation": "swish"}, "did you mean 'swiglu'|activation='swish' is not one of"),
        ({"drop_policy": "last"}, "drop_policy='last' is not one of"),
        ({"normalize_weights": None}, "normalize_weights=None is not one of"),
        ({"router_noise": "rsample"}, "router_noise='rsample' is not one of"),
        ({"balance_loss": "gshard"}, "balance_loss='gshard' is not one of"),
        ({"balance_loss_scope": "world"}, "balance_loss_scope='world' is not one of"),
        ({"backend": "cutlass"}, "backend='cutlass' is not one of"),
        ({"input_jitter": 1.0}, "input_jitter=1.0 must be in"),
        ({"input_dropout": -0.1}, "input_dropout=-0.1 must be in"),
        ({"logit_temperature": 0.0}, "logit_temperature=0.0 must be"),
        ({"weight_scale": float("inf")}, "weight_scale=inf must be"),
        ({"router_noise_std": -1.0}, "router_noise_std=-1.0 must be"),
        ({"aux_loss_weight": -0.1}, "aux_loss_weight=-0.1 must be"),
        ({"z_loss_weight": float("nan")}, "z_loss_weight=nan must be"),
        ({"num_shared_experts": -1}, "num_shared_experts=-1 must be"),
        ({"num_expert_groups": 4}, "num_expert_groups=4 must divide num_experts=6"),
        ({"num_limited_groups": 2}, "num_limited_groups=2 must be at most num_expert_groups=1"),
        ({"num_expert_groups": 6, "num_limited_groups": 1}, "allow more groups or lower top_k"),
        ({"dtype": torch.int32}, "dtype=torch.int32 must be float64"),
        ({"experts": nn.ModuleList([nn.Linear(D, D)])}, "experts has 1 modules and num_experts=6"),
        ({"experts": nn.Linear(D, D)}, "experts is a Linear; it must be an nn.ModuleList"),
        (
            {"router": "expert_choice", "score_function": "softmax_after_topk"},
            "lets experts choose",
        ),
        (
            {"router": "expert_choice", "bias_update_rate": 0.1},
            "bias_update_rate=0.1 has no effect",
        ),
        ({"router": "hash", "router_noise": "gumbel"}, "router_noise='gumbel' has no effect"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(**options)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


X = torch.zeros(2, 3, D, dtype=torch.float64)
IDS = torch.zeros(6, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (X[..., :-1], {}, r"x has shape \(2, 3, 6\); its last size must be dim=7"),
        (torch.tensor(1.0, dtype=torch.float64), {}, r"x has shape \(\)"),
        ([1.0], {}, "x is a list"),
        (X.long(), {}, "x has dtype torch.int64; it must be floating-point"),
        (X.float(), {}, "x has dtype torch.float32 and the experts torch.float64"),
        (X.to("meta"), {}, "x is on meta and the layer on cpu"),
        (X, {"token_mask": torch.ones(2, 4, dtype=torch.bool)}, r"token_mask has shape \(2, 4\)"),
        (
            X,
            {"token_mask": torch.ones(2, 3)},
            "token_mask has dtype torch.float32; it must be bool",
        ),
        (
            X,
            {"token_ids": torch.ones(2, 3)},
            "token_ids has dtype torch.float32; it must be an int",
        ),
        (X, {"token_ids": torch.ones(5, dtype=torch.int64)}, r"token_ids has shape \(5,\)"),
        (
            X,
            {"token_index": torch.ones(3, 2, dtype=torch.int64)},
            r"token_index has shape \(3, 2\)",
        ),
        (
            X,
            {"token_mask": torch.ones(2, 3, dtype=torch.bool, device="meta")},
            "token_mask is on meta",
        ),
        (X, {"top_k": 9}, "top_k=9 must be"),
        (X, {"capacity_factor": -0.5}, "capacity_factor=-0.5 must be"),
        (X, {"routing": Routing(IDS[:5])}, r"routing.expert_ids_TK has shape \(5, 2\)"),
        (X, {"routing": Routing(IDS.float())}, "routing.expert_ids_TK has dtype torch.float32"),
        (X, {"routing": Routing(IDS), "top_k": 1}, "top_k=1 and the replayed routing has K=2"),
        (X, {"routing": Routing(IDS, torch.ones(6, 1))}, r"routing.weights_TK has shape \(6, 1\)"),
        (X, {"routing": Routing(IDS - 1)}, "routing.expert_ids_TK holds -1"),
        (X, {"routing": Routing(IDS + 7)}, "routing.expert_ids_TK holds 7"),
    ],
)
def test_wrong_arguments(x, kwargs, message):
    layer = make()
    with pytest.raises(ConfigError, match=message) as caught:
        layer(x, **kwargs)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    with torch.no_grad(), pytest.raises(ConfigError, match=message):
        layer.eval()(x, **kwargs)


def test_route_degree_needs_a_spread_layer():
    layer, x = make(), torch.zeros(3, D, dtype=torch.float64)
    layer(x, route_degree=1)
    with pytest.raises(
        ConfigError, match="route_degree=2: this layer is on one process; leave it out"
    ):
        layer(x, route_degree=2)
