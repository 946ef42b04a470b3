"""The Tutel door against its documented semantics, in a loop of plain PyTorch."""

import copy

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.plain_moe import assert_plain, plain_moe, plain_signature
from torch.nn import functional as F

from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import MOELayer, moe_layer

D, E = 5, 4
FFN = {
    "type": "ffn",
    "num_experts_per_device": E,
    "hidden_size_per_expert": 9,
    "activation_fn": lambda h: F.relu(h),
}
LLAMA = {"type": "llama_ffn", "num_experts_per_device": E, "hidden_size_per_expert": 9}
CONSTRUCTOR = (
    "(self, gate_type, model_dim, experts=None, scan_expert_func=None, result_func=None, group=None, seeds=None, "
    "a2a_ffn_overlap_degree=1, is_postscore=True, batch_prioritized_routing=False, normalize_gate=True, "
    "is_gshard_loss=True, parallel_type='adaptive:1', use_2dh=False, **deprecated)"
)
FORWARD = (
    "(self, input, gate_index=0, capacity_factor=None, top_k=None, a2a_ffn_overlap_degree=None, reserve_dims=1, "
    "inequivalent_tokens=False, adaptive_r=None, megablocks_size=0)"
)


def build(gate=None, experts=FFN, **options):
    if not isinstance(gate, str):
        gate = {"type": "top", "k": 2, "capacity_factor": 0} | (gate or {})
    layer = moe_layer(gate, D, experts, seeds=(1, 1, 1), **options).double()
    with torch.no_grad():
        for parameter in layer._layer.experts.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return layer


def experts_of(layer):
    state = layer.state_dict()
    if "experts.W_fc1" in state:
        shapes = ((E, D, 9), (E, D, 9), (E, 9, D))
        w1, w2, w3 = (state[f"experts.W_fc{i}"].view(s) for i, s in enumerate(shapes, 1))
        return [lambda x, e=e: (F.silu(x @ w1[e]) * (x @ w2[e])) @ w3[e] for e in range(E)]
    w1, w2 = state["experts.batched_fc1_w"], state["experts.batched_fc2_w"]
    b1, b2 = state["experts.batched_fc1_bias"], state["experts.batched_fc2_bias"]
    return [lambda x, e=e: F.relu(x @ w1[e].T + b1[e]) @ w2[e] + b2[e] for e in range(E)]


def test_signatures():
    assert moe_layer is MOELayer
    assert plain_signature(MOELayer.__init__) == CONSTRUCTOR
    assert plain_signature(MOELayer.forward) == FORWARD


@pytest.mark.parametrize("experts", [FFN, LLAMA])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0, 1.0, -0.5])
@pytest.mark.parametrize("priority", [False, True])
def test_documented_semantics(experts, k, factor, priority):
    layer = build({"k": k, "capacity_factor": factor}, experts, batch_prioritized_routing=priority)
    x = torch.randn(24, D, dtype=torch.float64)
    expected = plain_moe(
        x,
        layer.state_dict()["gates.0.wg.weight"],
        experts_of(layer),
        k=k,
        capacity=k * int(abs(factor) * 24 / E) if factor else None,
        policy="priority" if priority else "first",
        normalize="topk" if k > 1 else "none",
    )
    y = layer(x)
    assert_plain(y, y.l_aux if k < 3 else None, layer.dispatch_count, expected)
    assert layer.l_aux is y.l_aux


def test_arguments_of_a_call_do_not_stick():
    layer, x = build({"k": 1}), torch.randn(24, D, dtype=torch.float64)
    before = layer(x).detach()
    layer(x, top_k=2, capacity_factor=0.25, adaptive_r=0, a2a_ffn_overlap_degree=2, megablocks_size=1)
    assert torch.equal(layer(x).detach(), before)


def test_copies_are_of_the_layer_and_not_of_its_last_call():
    layer, x = build(), torch.randn(24, D, dtype=torch.float64)
    y = layer(x)
    again = copy.deepcopy(layer)
    assert again.l_aux is None and again.dispatch_count is None
    assert torch.equal(again(x), y)
    assert layer.l_aux is y.l_aux


@pytest.mark.parametrize("factor", [0.5, -0.5])
def test_a_call_without_a_capacity_drops_nothing(factor):
    layer, free, x = build({"capacity_factor": factor}), build(), torch.randn(24, D).double()
    free.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, capacity_factor=0), free(x))
    assert not torch.equal(layer(x), free(x))


def test_dictionaries_stay_and_functions_are_called():
    gate, experts, seen = {"type": "top", "k": 1}, dict(FFN), []
    layer = moe_layer(
        gate,
        D,
        experts,
        scan_expert_func=lambda name, p: seen.append((name, p)),
        result_func=lambda y: 2 * y,
    )
    assert (gate, experts) == ({"type": "top", "k": 1}, FFN)
    assert {n for n, _ in seen} == {"w_in", "w_out", "b_in", "b_out"}
    assert all(p._tutel_expert for _, p in seen)
    x = torch.randn(3, D)
    doubled = layer(x)
    layer.result_func = None
    assert torch.equal(doubled, 2 * layer(x))
    assert doubled.l_aux is not None
    assert [n for n, _ in layer.get_parameter_iterator("gate")] == ["proj.weight"]


@pytest.mark.parametrize("biases", [(True, False), (False, True), (False, False)])
def test_missing_biases_stay_zero(biases):
    experts = FFN | {"has_fc1_bias": biases[0], "has_fc2_bias": biases[1]}
    layer = moe_layer({"type": "top", "k": 1}, D, experts)
    names = ("experts.batched_fc1_bias", "experts.batched_fc2_bias")
    assert [n in layer.state_dict() for n in names] == list(biases)
    layer(torch.randn(8, D)).sum().backward()
    missing = [p for p, has in zip(("b_in", "b_out"), biases, strict=True) if not has]
    for name in missing if any(biases) else ():
        parameter = layer._layer.experts.get_parameter(name)
        assert parameter.grad is None
        assert not parameter.any()


@pytest.mark.parametrize("gate", [{}, {"type": "cosine_top", "proj_dim": 7, "init_t": 0.25}])
@pytest.mark.parametrize("experts", [FFN, LLAMA])
def test_state_dicts_in_both_directions(gate, experts):
    layer, other = build(gate, experts), build(gate, experts)
    state = layer.state_dict()
    assert all(k.split(".")[0] in ("gates", "experts", "_num_global_experts") for k in state)
    assert state["_num_global_experts"] == E
    other.load_state_dict(state)
    assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())
    state.popitem()
    last = next(reversed([k for k in state if k.startswith("experts.")]))
    del state[last]
    with pytest.raises(RuntimeError, match=f"{last} is missing"):
        other.load_state_dict(state)


def test_importance_and_load():
    layer = build({"gate_noise": 1.0}, is_gshard_loss=False)
    y = layer(torch.randn(16, D, dtype=torch.float64))
    y.l_aux.backward()
    assert layer._layer.router.proj.weight.grad.any()
    ours = copy.deepcopy(layer._layer)  # variances over E; Tutel's are over E - 1
    ours.options = ours.options.model_copy(update={"aux_loss_weight": 1.0})
    x = torch.randn(16, D, dtype=torch.float64)
    expected = ours.eval()(x)[1].aux_loss * E / (E - 1)
    assert_close_fp64(layer.eval()(x).l_aux.detach(), expected.detach(), what="l_aux")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gate": {"type": "custom"}}, "'custom' with a module"),
        ({"gate": "TopKGate"}, "gate_type='TopKGate': must be a dictionary"),
        ({"gate": {"tau": 1}}, "gate_type has 'tau'"),
        ({"experts": {"type": "custom"}}, "experts=..."),
        ({"experts": FFN | {"hidden": 3}}, "experts has 'hidden'"),
        ({"experts": {"type": "moe"}}, "experts has type 'moe'"),
        ({"pad_sample": True}, "moe_layer has 'pad_sample'"),
        ({"experts": FFN | {"num_experts_per_device": 0}}, "num_experts_per_device=0"),
        ({"experts": FFN | {"num_experts_per_device": -2}}, "num_experts_per_device=-2"),
        ({"experts": {"type": "ffn"}}, "hidden_size_per_expert"),
        ({"is_gshard_loss": False}, "gate_noise"),
        ({"parallel_type": "fast"}, "parallel_type='fast'"),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(ConfigError, match=words):
        build(**arguments)


@pytest.mark.parametrize("call", [{"gate_index": 1}, {"reserve_dims": 2}, {"adaptive_r": 3}])
def test_mistakes_in_a_call(call):
    with pytest.raises(ConfigError, match=next(iter(call))):
        build()(torch.randn(3, D, dtype=torch.float64), **call)
