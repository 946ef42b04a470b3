"""The DeepSpeed door against its documented semantics, in a loop of plain PyTorch."""

import math

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64, assert_differs
from tests.support.plain_moe import assert_plain, plain_moe, plain_signature
from torch import nn

from expertmesh.errors import ConfigError
from expertmesh.integrations import deepspeed
from expertmesh.integrations.deepspeed import MoE
from expertmesh.moe.experts import ExpertList, GroupedExperts

D, E = 6, 5
SIGNATURE = (
    "(self, hidden_size, expert, num_experts=1, ep_size=1, k=1, capacity_factor=1.0, eval_capacity_factor=1.0, "
    "min_capacity=4, use_residual=False, noisy_gate_policy=None, drop_tokens=True, use_rts=True, use_tutel=False, "
    "enable_expert_tensor_parallelism=False, top2_2nd_expert_sampling=True)"
)


class Tuple(nn.Module):
    """An expert as Megatron's: it returns its output and a bias that is not added."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 9), nn.Linear(9, D)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x))), self.fc2.bias


def grouped_expert():
    return nn.Sequential(nn.Linear(D, 9), nn.GELU(), nn.Linear(9, D))


def build(expert=grouped_expert, **options):
    torch.manual_seed(3)
    options = {"num_experts": E, "use_rts": False, "top2_2nd_expert_sampling": False, **options}
    moe = MoE(D, expert(), **options).double()
    with torch.no_grad():  # experts begin equal
        for parameter in moe._layer.experts.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return moe


def experts_of(moe, make):
    state, found = moe.state_dict(), []
    for e in range(E):
        expert = make().double()
        prefix = f"deepspeed_moe.experts.deepspeed_experts.{e}."
        expert.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        found.append((lambda x, f=expert: f(x)[0]) if make is Tuple else expert)
    return found


def test_signature():
    assert plain_signature(MoE.__init__) == SIGNATURE
    assert plain_signature(MoE.forward) == "(self, hidden_states, used_token=None)"


@pytest.mark.parametrize("make", [grouped_expert, Tuple])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 22])
def test_documented_semantics(make, k, training, tokens):
    moe = build(make, k=k, capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=2).train(training)
    assert isinstance(moe._layer.experts, ExpertList if make is Tuple else GroupedExperts)
    x = torch.randn(tokens, D, dtype=torch.float64)
    factor = 1.0 if training else 2.0
    expected = plain_moe(
        x,
        moe._layer.router.proj.weight.detach(),
        experts_of(moe, make),
        k=k,
        capacity=max(2, math.ceil(k * tokens / E * factor)),
        policy="weight" if k > 2 else "first",
        normalize="none" if k == 1 else "kept",
    )
    assert_plain(*moe(x), expected)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("factor", [0.4, 1.0])
def test_the_layer_and_the_gating_functions_keep_the_same(k, factor):
    moe, x = build(k=k, capacity_factor=factor, min_capacity=1), torch.randn(22, D, dtype=torch.float64)
    logits = x @ moe._layer.router.proj.weight.T
    if k < 3:
        options = {"use_rts": False} if k == 1 else {"top2_2nd_expert_sampling": False}
        gating = deepspeed.top1gating if k == 1 else deepspeed.top2gating
        l_aux, weights, mask, counts = gating(logits, factor, 1, **options)
    else:
        l_aux, weights, mask, counts = deepspeed.topkgating(logits, k, factor, 1)
    rows = torch.einsum("sec,sd->ecd", mask.double(), x)
    each = torch.stack([expert(row) for expert, row in zip(experts_of(moe, grouped_expert), rows, strict=True)])
    assert_plain(*moe(x), (torch.einsum("sec,ecd->sd", weights, each).detach(), l_aux.detach(), counts))


@pytest.mark.parametrize("k", [1, 2])
def test_no_drop_and_used_token(k):
    moe = build(k=k, drop_tokens=False, min_capacity=1)
    x = torch.randn(3, 7, D, dtype=torch.float64)
    used = (torch.arange(21) % 3 != 0).to(torch.float32)
    expected = plain_moe(
        x.flatten(0, 1),
        moe._layer.router.proj.weight.detach(),
        experts_of(moe, grouped_expert),
        k=k,
        normalize="none" if k == 1 else "topk",
        mask_T=used.bool(),
    )
    assert_plain(*moe(x, used_token=used), expected)


def test_residual():
    moe = build(use_residual=True, drop_tokens=False)
    x = torch.randn(9, D, dtype=torch.float64)
    y, _, _ = moe(x)
    mix = torch.softmax(moe.coefficient(x), -1)
    routed, _, _ = plain_moe(x, moe._layer.router.proj.weight.detach(), experts_of(moe, grouped_expert), k=1)
    assert_close_fp64(y.detach(), (routed * mix[:, :1] + moe.mlp(x) * mix[:, 1:]).detach(), what="y")


def test_noise_is_for_training_and_leaves_the_first_expert():
    moe = build(k=2, top2_2nd_expert_sampling=True, drop_tokens=False)
    x = torch.randn(64, D, dtype=torch.float64)
    calm = build(k=2, drop_tokens=False)
    _, l_aux, _ = moe.train()(x)
    _, expected, _ = calm(x)
    assert_close_fp64(l_aux.detach(), expected.detach(), what="first choices")
    assert_differs(moe(x)[0].detach(), calm(x)[0].detach(), what="second choices")
    assert_close_fp64(moe.eval()(x)[0].detach(), calm.eval()(x)[0].detach(), what="evaluation")


def test_experts_begin_equal_and_are_tagged():
    moe = MoE(D, grouped_expert(), num_experts=4, ep_size=2)
    w_in = moe._layer.experts.w_in
    assert torch.equal(w_in[0], w_in[3])
    assert (moe.num_local_experts, moe.expert_group_name) == (2, "ep_size_2")
    assert {p.group_name for p in moe._layer.experts.parameters()} == {"ep_size_2"}
    assert not any(p.allreduce for p in moe._layer.experts.parameters())
    assert not hasattr(moe._layer.router.proj.weight, "allreduce")


@pytest.mark.parametrize("make", [grouped_expert, Tuple])
def test_state_dicts_in_both_directions(make):
    moe, other = build(make, use_residual=True), build(make, use_residual=True, k=2)
    state = moe.state_dict()
    inside = [k for k, _ in make().named_parameters()]
    experts = "deepspeed_moe.experts.deepspeed_experts"
    assert set(state) == (
        {"deepspeed_moe.gate.wg.weight", "coefficient.weight", "coefficient.bias"}
        | {f"{experts}.{e}.{k}" for e in range(E) for k in inside}
        | {f"mlp.{k}" for k in inside}
    )
    other.load_state_dict(state)
    assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())
    del state[f"{experts}.3.{inside[0]}"]
    with pytest.raises(RuntimeError, match=f"{experts}.3.{inside[0]} is missing"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": [4, 8]}, "num_experts=.4, 8."),
        ({"ep_size": 3}, "ep_size=3"),
        ({"k": 6}, "top_k"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy='Loud'"),
    ],
)
def test_mistakes(change, words):
    with pytest.raises(ConfigError, match=words):
        build(**change)


def test_a_mask_of_another_size():
    with pytest.raises(ConfigError, match="used_token"):
        build()(torch.randn(4, D, dtype=torch.float64), used_token=torch.ones(3))
