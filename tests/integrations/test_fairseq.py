"""The fairseq door against its documented semantics, in a loop of plain PyTorch."""

import math

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.plain_moe import assert_plain, plain_moe, plain_signature
from torch import nn

from expertmesh.errors import ConfigError
from expertmesh.integrations.fairseq import MOELayer, Top1Gate, Top2Gate

D, E = 6, 4


def experts(dropout=0.0):
    return nn.ModuleList(
        nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.Dropout(dropout), nn.Linear(9, D)) for _ in range(E)
    )


def test_signatures():
    assert plain_signature(MOELayer.__init__) == ("(self, gate, experts, args=None, group=None, all2all_group=None)")
    assert plain_signature(Top1Gate.__init__) == (
        "(self, model_dim, num_experts, use_fp32=False, input_noise_type=None, capacity_factor=1.0, "
        "moe_eval_capacity_token_fraction=0.25)"
    )
    assert plain_signature(Top2Gate.__init__) == (
        "(self, model_dim, num_experts, use_fp32=False, second_expert_policy='sampling', "
        "normalize_gate_prob_before_dropping=False, moe_eval_capacity_token_fraction=0.25, "
        "batch_prioritized_routing=False)"
    )


CASES = {
    "top1": (Top1Gate, {}, 1, "first", "none"),
    "top2": (Top2Gate, {"second_expert_policy": "all"}, 2, "first", "kept"),
    "top2-before": (
        Top2Gate,
        {"second_expert_policy": "all", "normalize_gate_prob_before_dropping": True},
        2,
        "first",
        "topk",
    ),
    "top2-priority": (
        Top2Gate,
        {"second_expert_policy": "all", "batch_prioritized_routing": True},
        2,
        "priority",
        "kept",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fraction", [0.3, 0.0])
def test_documented_semantics(name, training, fraction):
    gate_class, options, k, policy, normalize = CASES[name]
    gate = gate_class(D, E, moe_eval_capacity_token_fraction=fraction, **options)
    layer = MOELayer(gate, experts(), args=None).double().train(training)
    x = torch.randn(6, 3, D, dtype=torch.float64)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    T = 18 - 2
    capacity = math.ceil(k * T / E) if training or not fraction else math.ceil(fraction * T)
    expected = plain_moe(
        x.flatten(0, 1),
        gate.wg.weight.detach(),
        list(layer.experts),
        k=k,
        capacity=capacity,
        policy=policy,
        normalize=normalize,
        mask_T=~padding.T.flatten(),
    )
    y, l_aux = layer(x, input_padding_mask=padding)
    assert_plain(y, l_aux, layer.metadata["tokens_per_expert"], expected)


def test_names_of_the_state_dict_and_of_parameters():
    layer = MOELayer(Top2Gate(D, E), experts(0.1), args=None)
    inside = [k for k, _ in experts()[0].named_parameters()]
    names = {"gate.wg.weight"} | {f"experts.{e}.{k}" for e in range(E) for k in inside}
    assert set(layer.state_dict()) == names == {n for n, _ in layer.named_parameters()}
    assert all(p.expert for p in layer.experts.parameters())
    layer(torch.randn(5, 2, D))[0].sum().backward()
    assert layer.gate.wg.weight.grad is not None


def output_and_gradients(x, own=slice(None)):
    torch.manual_seed(0)
    gate = Top2Gate(D, E, moe_eval_capacity_token_fraction=1.0).double()  # drops nothing
    layer = MOELayer(gate, nn.ModuleList(list(experts().double())[own])).eval()
    y, l_aux = layer(x)
    y.square().sum().backward()
    return y.detach(), l_aux.detach(), [p.grad for p in layer.experts.parameters()]


def output_of_a_rank(x):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return output_and_gradients(x.chunk(size)[rank], slice(rank * E // size, (rank + 1) * E // size))


def test_ranks_with_their_own_experts_are_one_process(two_ranks):
    x = torch.randn(22, 1, D, dtype=torch.float64)
    y, l_aux, grads = output_and_gradients(x)
    found = two_ranks.run(output_of_a_rank, x)
    assert_close_fp64(torch.cat([part for part, _, _ in found]), y, what="y")
    for _, part, _ in found:
        assert_close_fp64(part, l_aux, what="l_aux")
    for part, whole in zip([g for _, _, own in found for g in own], grads, strict=True):
        assert_close_fp64(part, whole, what="gradient")


def test_modes_types_and_copies_reach_the_layer():
    layer = MOELayer(Top1Gate(D, E), experts(), args=None).eval().to(torch.bfloat16)
    y, _ = layer(torch.randn(5, 2, D, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert not layer._hidden[0].training


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Top1Gate(D, E, input_noise_type="jitter"), "input_noise_type='jitter'"),
        (lambda: Top2Gate(D, E, second_expert_policy="random"), "second_expert_policy='random'"),
        (lambda: MOELayer(nn.Linear(D, E), experts()), "gate is a Linear"),
        (lambda: MOELayer(Top1Gate(D, 7), experts()), "4 modules"),
        (lambda: MOELayer(Top1Gate(D, E), experts())(torch.ones(1, D), torch.ones(1)), "2 inputs"),
        (
            lambda: MOELayer(Top1Gate(D, E), experts())(
                torch.ones(3, 2, D), input_padding_mask=torch.ones(4, 2, dtype=torch.bool)
            ),
            "input_padding_mask",
        ),
    ],
)
def test_mistakes(build, words):
    with pytest.raises(ConfigError, match=words):
        build()
