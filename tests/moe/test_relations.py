"""Relations between calls that hold whatever the numbers are: permutations, batches, masks, replay."""

import pytest
import torch

from expertmesh import MoELayer, Routing
from expertmesh.config.moe_rules import NOT_READ_BY
from expertmesh.moe.random import key_noise
from expertmesh.testing import numerics

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
DROPLESS_PER_TOKEN = [name for name in ROUTERS if not name.startswith("expert_choice")]
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
    if layer.routing_options.kind == "hash":
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


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", ROUTERS)
def test_permuting_tokens_permutes_the_output(name, noise):
    """Noise is keyed by the token's index, so it moves along."""
    if name == "hash" and noise != "clean":
        noise = "clean"
    layer, x = make(name, **NOISES[noise]), tokens()
    order = torch.randperm(T)
    y, stats, grads = run(layer, x)
    ids = {"token_ids": order} if name == "hash" else {}
    y2, stats2, grads2 = run(layer, x[order], token_index=order, **ids)
    close(y2, y[order], "y")
    assert torch.equal(stats2.topk_expert_ids_TK, stats.topk_expert_ids_TK[order])
    assert torch.equal(stats2.num_tokens_per_expert_E, stats.num_tokens_per_expert_E)
    close(stats2.aux_loss, stats.aux_loss, "aux_loss")
    grads_close({**grads2, "x": grads2["x"][order.argsort()]}, grads)


@pytest.mark.parametrize("name", [n for n in ROUTERS if n not in ("hash", "groups")])
@pytest.mark.parametrize("capacity", [{}, {"capacity_factor": 0.7, "drop_policy": "priority"}])
def test_permuting_experts_changes_nothing(name, capacity):
    layer, x = make(name, **capacity), tokens()
    y, stats, grads = run(layer, x)
    order = torch.randperm(E)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            by_expert = key.startswith("experts.") or key == "router.expert_embeddings"
            if by_expert or (key == "router.proj.weight" and name != "cosine"):
                parameter.copy_(parameter[order].clone())
        if layer.expert_bias_E is not None:
            layer.expert_bias_E.copy_(layer.expert_bias_E[order].clone())
    y2, stats2, grads2 = run(layer, x)
    close(y2, y, "y")
    assert torch.equal(stats2.num_tokens_per_expert_E, stats.num_tokens_per_expert_E[order])
    assert int(stats2.num_dropped) == int(stats.num_dropped)
    close(stats2.aux_loss, stats.aux_loss, "aux_loss")
    close(stats2.z_loss, stats.z_loss, "z_loss")
    close(grads2["x"], grads["x"], "gradient of x")
    close(grads2["experts.w_in"], grads["experts.w_in"][order], "gradient of w_in")


@pytest.mark.parametrize("name", DROPLESS_PER_TOKEN)
def test_a_dropless_token_does_not_depend_on_its_batch(name):
    layer, x = make(name).eval(), tokens()
    ids = torch.arange(T)
    whole, _, _ = run(layer, x, token_ids=ids)
    for part in (slice(0, 1), slice(3, 11), slice(T - 1, T)):
        close(run(layer, x[part], token_ids=ids[part])[0], whole[part], "y")


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
@pytest.mark.parametrize("name", ROUTERS)
def test_masked_tokens_are_as_if_absent(name, capacity):
    """Also when they hold NaN: output, losses, counts and all gradients are those of the real tokens alone."""
    if name == "expert_choice_normalised":
        capacity = "dropless"
    layer, x = make(name, **CAPACITIES[capacity]), tokens()
    keep = torch.rand(T) < 0.6
    index = torch.arange(T)
    dirty = torch.where(keep[:, None], x, float("nan"))
    y, stats, grads = run(layer, dirty, token_mask=keep, token_index=index, token_ids=index)
    y2, stats2, grads2 = run(layer, x[keep], token_index=index[keep], token_ids=index[keep])
    close(y[keep], y2, "y")
    assert (y[~keep] == 0).all() and (grads["x"][~keep] == 0).all()
    close(stats.aux_loss, stats2.aux_loss, "aux_loss")
    close(stats.z_loss, stats2.z_loss, "z_loss")
    assert torch.equal(stats.num_tokens_per_expert_E, stats2.num_tokens_per_expert_E)
    assert int(stats.num_dropped) == int(stats2.num_dropped)
    grads_close({**grads, "x": grads["x"][keep]}, grads2)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", ROUTERS)
def test_replay_equals_the_original(name, noise, capacity):
    """Ids alone give the same output and gradients (the load loss apart, which needs the noise); weights the same output."""
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


@pytest.mark.parametrize(
    "name", ["softmax", "sigmoid_biased", "after_topk", "groups", "all", "hash", "cosine"]
)
def test_equal_experts_with_normalised_weights_are_one_dense_mlp(name):
    layer = make(
        name, normalize_weights="topk", weight_scale=1.0, num_shared_experts=1, residual=False
    )
    with torch.no_grad():
        for key, parameter in layer.experts.named_parameters():
            parameter.copy_(parameter[:1].expand_as(parameter).clone())
            getattr(layer.shared_experts, key).copy_(parameter[0])
    x = tokens()
    y, _, _ = run(layer, x)
    close(y, 2.0 * layer.shared_experts(x).detach(), "y")


@pytest.mark.parametrize("scope", ["group", "global"])
@pytest.mark.parametrize("name", [*DROPLESS_PER_TOKEN, "expert_choice"])
@pytest.mark.parametrize("policy", ["first", "priority", "weight", "random"])
def test_routing_groups_are_separate_calls(name, policy, scope):
    """Outputs of a batch of groups are those of one call per group, tail included; so is the mean balance loss."""
    size = 8
    options = {
        "capacity_factor": 0.7,
        "min_capacity": 1,
        "drop_policy": policy,
        "balance_loss_scope": scope,
    }
    layer, x, index = make(name, routing_group_size=size, **options), tokens(), torch.arange(T)
    y, stats, _ = run(layer, x, token_index=index, token_ids=index)
    parts = [slice(a, min(a + size, T)) for a in range(0, T, size)]
    runs = [run(layer, x[p], token_index=index[p], token_ids=index[p]) for p in parts]
    close(torch.cat([r[0] for r in runs]), y, "y")
    assert sum(int(r[1].num_dropped) for r in runs) == int(stats.num_dropped)
    share = torch.tensor([(p.stop - p.start) / T for p in parts], dtype=torch.float64)
    mean = (torch.stack([r[1].aux_loss.detach() for r in runs]) * share).sum()
    if scope == "group":
        close(mean, stats.aux_loss, "aux_loss")
    elif name not in ("hash", "all", "expert_choice"):  # whose counts are even in every group
        numerics.assert_differs(mean, stats.aux_loss, what="aux_loss")
