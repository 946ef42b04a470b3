"""Replay: a call that is given the choices of another one gives the same; all else is compared with the oracle
(test_exactness.py)."""

import pytest
import torch
from tests.oracle import numerics

from expertmesh import MoELayer, Routing
from expertmesh.config.moe_rules import NOT_READ_BY
from expertmesh.moe.routing_noise import key_noise

T, D, F, E, K = 20, 7, 9, 6, 2
BASE = {
    "dim": D,
    "hidden_dim": F,
    "num_experts": E,
    "top_k": K,
    "seed": 0,
    "dtype": torch.float64,
    "bias": True,
    "aux_loss_weight": 0.5,
    "z_loss_weight": 0.5,
    "num_shared_experts": 1,
    "residual": True,
}
ROUTERS = {
    "softmax": {},
    "sigmoid_biased": {"score_function": "sigmoid", "bias_update_rate": 0.1, "weight_scale": 2.5},
    "after_topk": {"score_function": "softmax_after_topk"},
    "plain_top1": {"top_k": 1},
    "all": {"top_k": E},
    "cosine": {"router": "cosine", "cosine_dim": 4},
    "groups": {"num_expert_groups": 3, "num_limited_groups": 2},
    "hash": {"router": "hash"},
    "expert_choice": {"router": "expert_choice"},
    "expert_choice_normalised": {"router": "expert_choice", "normalize_weights": "topk"},
}
NOISES = {
    "clean": {},
    "gumbel": {"router_noise": "gumbel", "input_jitter": 0.2, "expert_output_masking": 0.3},
    "gaussian": {
        "router_noise": "gaussian",
        "input_dropout": 0.2,
        "balance_loss": "importance_load",
    },
}


def make(name, **more):
    options = {**BASE, **ROUTERS[name], **more}
    idle = NOT_READ_BY[options.get("router", "topk")]
    layer = MoELayer(**{option: v for option, v in options.items() if option not in idle})
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key.endswith(("b_in", "b_out", "bias")):
                parameter.normal_()
            elif key == "router.proj.weight":
                parameter.mul_(4.0)
        if layer.expert_bias_E is not None:
            layer.expert_bias_E.copy_(0.1 * torch.randn(E))
    key_noise(layer, seed=3, step=4)
    return layer


def run(layer, x, **call):
    """Output, statistics and all gradients of one call (of a fixed upstream gradient per token value)."""
    if layer.options.router_kind == "hash":
        call.setdefault("token_ids", torch.arange(len(x)))
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, stats = layer(x, **call)
    (y.square().sum() + stats.aux_loss + stats.z_loss).backward()
    return y.detach(), stats, {"x": x.grad, **{k: p.grad for k, p in layer.named_parameters()}}


def close(a, b, what):
    numerics.assert_close_fp64(a, b, what=what)


def grads_close(a, b):
    scale = max(numerics.magnitude(g) for g in b.values() if g is not None)
    assert a.keys() == b.keys()
    for name in a:
        left = torch.zeros(()) if a[name] is None else a[name]
        right = torch.zeros_like(left) if b[name] is None else b[name]
        left = torch.zeros_like(right) if a[name] is None else left
        numerics.assert_close_fp64(left.double(), right.double(), what=name, scale=scale)


def tokens():
    return torch.randn(T, D, dtype=torch.float64)


CAPACITIES = {
    "dropless": {},
    "first": {"capacity_factor": 0.6, "min_capacity": 1, "drop_policy": "first"},
    "priority_kept": {
        "capacity_factor": 0.6,
        "min_capacity": 1,
        "drop_policy": "priority",
        "normalize_weights": "kept",
    },
    "random": {"capacity_factor": 0.6, "min_capacity": 1, "drop_policy": "random"},
}


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", ROUTERS)
def test_replay_equals_the_original(name, noise, capacity):
    """Ids alone give the same output and gradients (the load loss apart, which needs the noise); weights the same
    output."""
    if name == "hash":
        noise = "clean"
    options = {**NOISES[noise], **CAPACITIES[capacity]}
    if name == "expert_choice_normalised":
        options.pop("normalize_weights", None)
    options["balance_loss"] = "switch"
    layer, x = make(name, **options), tokens()
    y, stats, grads = run(layer, x)
    for routing in (stats, Routing(stats.topk_expert_ids_TK)):
        y2, stats2, grads2 = run(layer, x, routing=routing)
        close(y2, y, "y")
        close(stats2.aux_loss, stats.aux_loss, "aux_loss")
        assert torch.equal(stats2.topk_expert_ids_TK, stats.topk_expert_ids_TK)
        assert int(stats2.num_dropped) == int(stats.num_dropped)
        grads_close(grads2, grads)
    y3, stats3, _ = run(layer, x, routing=Routing(stats.topk_expert_ids_TK, stats.topk_weights_TK))
    close(y3, y, "y from given weights")
    close(stats3.topk_weights_TK, stats.topk_weights_TK, "weights")
