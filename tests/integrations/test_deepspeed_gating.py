"""The gating functions of the DeepSpeed door against a loop over tokens, and against DeepSpeed's where it is
installed."""

import importlib.util

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from torch import nn

from expertmesh.errors import ConfigError
from expertmesh.integrations import deepspeed as door

S, E = 13, 4
CALLS = {
    "top1": ("top1gating", (), {"use_rts": False}),
    "top2": ("top2gating", (), {"top2_2nd_expert_sampling": False}),
    "top3": ("topkgating", (3,), {}),
    "top3 by position": ("topkgating", (3,), {"drop_policy": "position"}),
    "top1 with random tokens": ("top1gating", (), {"use_rts": True}),
    "top1 with noise": ("top1gating", (), {"noisy_gate_policy": "RSample", "use_rts": True}),
    "top2 with noise": ("top2gating", (), {"top2_2nd_expert_sampling": True}),
}
LIMITS = [(1.0, 0, True), (0.4, 0, True), (0.1, 4, True), (1.0, 0, False), (9.0, 0, True)]
"""Capacity factor, min_capacity, drop_tokens."""


def logits():
    return torch.randn(S, E, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def gated(module, name, logits, limits, **more):
    function, first, options = CALLS[name]
    factor, least, drops = limits
    torch.manual_seed(5)
    how = options | {"drop_tokens": drops} | more
    return getattr(module, function)(logits.clone(), *first, factor, least, **how)


def by_hand(name, logits, factor, least, drops):
    """Loss, weights as {(token, expert, row): weight} and choices, token by token."""
    k = int(name[3])
    p = torch.softmax(logits, 1)
    best = p.topk(k, 1).indices.tolist()
    counts = [sum(e in row for row in best) for e in range(E)]
    capacity = max(-int(-(S / E * factor * k) // 1), least) if drops else max(counts)
    kept = [[True] * k for _ in range(S)]
    for e in range(E):
        mine = [(t, row.index(e)) for t, row in enumerate(best) if e in row]
        if name == "top2":
            mine.sort(key=lambda c: c[1])
        elif name == "top3":
            mine.sort(key=lambda c: -p[c[0], e])
        for t, j in mine[capacity:]:
            kept[t][j] = False
    found = {}
    for e in range(E):
        mine = [(t, row.index(e)) for t, row in enumerate(best) if e in row]
        if name == "top2":
            mine.sort(key=lambda c: c[1])
        for row, (t, _) in enumerate(c for c in mine if kept[c[0]][c[1]]):
            total = sum(p[t, best[t][i]] for i in range(k) if kept[t][i]) if k > 1 else 1.0
            found[t, e, row] = p[t, e] / total
    first = [sum(row[0] == e for row in best) for e in range(E)]
    share = counts if k != 2 else first
    loss = sum(p[:, e].mean() * share[e] / S for e in range(E)) * E / (k if k > 2 else 1)
    return loss, found, counts, capacity


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["top1", "top2", "top3", "top3 by position"])
def test_choices_are_those_of_a_loop(name, limits):
    given = logits().requires_grad_()
    loss, weights, mask, counts = gated(door, name, given, limits)
    expected, found, every, capacity = by_hand(name, logits(), *limits)
    assert_close_fp64(loss.detach(), expected, what="loss")
    assert weights.shape == (S, E, capacity) and counts.tolist() == every
    assert sorted(map(tuple, mask.nonzero().tolist())) == sorted(found)
    for at, weight in found.items():
        assert_close_fp64(weights[at].detach(), weight, what=str(at))
    (weights.square().sum() + loss).backward()
    assert given.grad.isfinite().all() and given.grad.any()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", CALLS)
def test_lists_say_what_masks_say(name, limits):
    loss, weights, _, counts = gated(door, name, logits(), limits)
    routes = gated(door, name, logits(), limits, sparse_routes=True)
    dense = torch.zeros_like(weights)
    for ids, places, chosen in zip(*routes[3:6], strict=True):
        for t in range(S):
            if ids[t] >= 0:
                dense[t, ids[t], places[t]] += chosen[t]
    assert torch.equal(dense, weights) and torch.equal(routes[0], loss)
    assert routes[1:3] == (weights.shape[2], E) and torch.equal(routes[6], counts)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed not installed")
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", [n for n in CALLS if n != "top1"])
def test_choices_are_deepspeeds(name, limits):
    """With its random numbers. Without any, its choice of equal candidates is arbitrary."""
    from deepspeed.moe import sharded_moe

    x = logits().float()
    ours, theirs = (gated(module, name, x, limits) for module in (door, sharded_moe))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_unused_tokens_are_not_routed():
    used = torch.tensor([1.0, 0.0] * 6 + [1.0])
    _, weights, mask, counts = door.top1gating(logits(), 9.0, 0, used_token=used)
    assert not mask[used == 0].any() and mask[used == 1].sum() == 7 == counts.sum()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("policy", [None, "Jitter", "RSample"])
def test_a_gate_is_its_function(k, policy):
    gate = door.TopKGate(8, E, k=k, min_capacity=0, noisy_gate_policy=policy, eval_capacity_factor=2.0)
    x = torch.randn(S, 8)
    noisy = gate(x)
    assert noisy[1].shape[2] < gate.eval()(x)[1].shape[2]
    name = {1: "top1", 2: "top2", 3: "top3"}[k]
    gate.top2_2nd_expert_sampling = gate.use_rts = False
    expected = gated(door, name, gate.wg(x), (2.0, 0, True))
    assert all(torch.equal(a, b) for a, b in zip(gate(x), expected, strict=True))


def test_mistakes():
    with pytest.raises(ConfigError, match="drop_policy"):
        door.topkgating(logits(), 2, 1.0, 0, drop_policy="random")
    with pytest.raises(ConfigError, match="k=5"):
        door.topkgating(logits(), 5, 1.0, 0)


@pytest.mark.parametrize("make", ["grouped", "modules"])
def test_the_inner_layer_has_its_names(make):
    expert = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) if make == "grouped" else nn.Linear(8, 8)
    moe, calls = door.MoE(8, expert, num_experts=E, k=2, min_capacity=0), []
    moe.deepspeed_moe.register_forward_hook(lambda *_: calls.append(1))
    _, l_aux, counts = moe(torch.randn(S, 8))
    inner = moe.deepspeed_moe
    assert calls == [1] and inner.l_aux is l_aux and inner.exp_counts is counts
    assert inner.gate.k == 2 and inner.gate.wg.weight is inner.router.proj.weight
    names = [name for name, _ in moe.named_parameters()]
    assert all(name.startswith("deepspeed_moe.") for name in names)
    assert any(".experts." in name for name in names)


def test_files_of_experts_in_both_directions(tmp_path):
    torch.manual_seed(0)

    def make():
        layers = (door.MoE(8, nn.Linear(8, 8), num_experts=n) for n in (E, 2))
        return nn.Sequential(nn.Linear(8, 8), *layers)

    model, other = make(), make()
    door.save_expert_files(model, tmp_path, "step3")
    saved = {path.name for path in (tmp_path / "step3").iterdir()}
    numbers = [(0, e) for e in range(E)] + [(1, e) for e in range(2)]
    experts = {f"layer_{n}_expert_{e}_mp_rank_00_model_states.pt" for n, e in numbers}
    assert saved == experts | {"mp_rank_00_model_states.pt"}
    assert (tmp_path / "latest").read_text() == "step3"
    other.load_state_dict(door.load_expert_files(tmp_path))
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in other.state_dict().items())
    with pytest.raises(ConfigError, match="has no mp_rank_00_model_states.pt"):
        door.load_expert_files(tmp_path, "step4")
    with pytest.raises(ConfigError, match="has no file latest"):
        door.load_expert_files(tmp_path / "step3")
