"""Routers: the choice, the weights, the precision, and modules of the user's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import (
    assert_close_fp64,
    assert_two_times,
    assert_weights,
    sums_of_product,
)
from torch import nn

from expertmesh import ConfigError, MoELayer, Routing
from expertmesh.moe.router import CosineRouter
from expertmesh.moe.selection import chosen_probability, hash_experts
from expertmesh.moe.types import RouterOutput
from expertmesh.ops.router_linear import router_linear

D, F_, E, T = 6, 4, 8, 40


def make(**kwargs):
    options = {"dim": D, "hidden_dim": F_, "num_experts": E, "top_k": 2, "seed": 0} | kwargs
    options.setdefault("dtype", torch.float64)
    return MoELayer(**options)


def tokens(num_tokens=T, dtype=torch.float64):
    return torch.randn(num_tokens, D, dtype=dtype)


def test_cosine_router_has_a_bounded_learnable_temperature():
    layer, x = make(router="cosine", cosine_dim=3, normalize_weights="none"), tokens()
    router = layer.router
    assert isinstance(router, CosineRouter)

    def expected(scale):
        cosine = F.normalize(x @ router.proj.weight.t()) @ F.normalize(router.expert_embeddings).t()
        return (cosine * scale).softmax(-1).topk(2).values

    assert_close_fp64(layer(x)[1].topk_weights_TK, expected(2.0), what="starts at 0.5")
    layer(x)[0].sum().backward()
    assert router.log_scale.grad.abs() > 0
    with torch.no_grad():
        router.log_scale.fill_(50.0)
    assert_close_fp64(layer(x)[1].topk_weights_TK, expected(100.0), what="never below 0.01")
    layer(torch.zeros(3, D, dtype=torch.float64))[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_bias_update_is_the_sign_rule():
    layer = make(bias_update_rate=0.25, score_function="sigmoid")
    layer.update_expert_bias(torch.tensor([10, 0, 4, 4, 4, 4, 4, 2]))
    expected = [-0.25, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25]
    assert layer.expert_bias_E.tolist() == expected
    assert "expert_bias_E" in layer.state_dict()
    with pytest.raises(ConfigError, match="num_tokens_per_expert_E has shape"):
        layer.update_expert_bias(torch.ones(3))
    plain = make()
    plain.update_expert_bias(torch.ones(E))
    assert plain.expert_bias_E is None and "expert_bias_E" not in plain.state_dict()


def test_bias_balances_a_collapsed_router():
    layer = make(bias_update_rate=0.02, score_function="sigmoid", top_k=1)
    x = tokens(512) + 1.0
    with torch.no_grad():
        layer.router.proj.weight[3] += 0.3
    before = layer(x)[1].num_tokens_per_expert_E.max().item()
    for _ in range(200):
        layer.update_expert_bias(layer(x)[1].num_tokens_per_expert_E)
    assert layer(x)[1].num_tokens_per_expert_E.max().item() < 0.5 * before


def test_hash_routes_by_id_alone_to_distinct_experts():
    layer, x = make(router="hash", top_k=3), tokens()
    ids = torch.randint(0, 1000, (T,))
    first = layer(x, token_ids=ids)[1]
    assert torch.equal(layer(tokens(), token_ids=ids)[1].topk_expert_ids_TK, first.topk_expert_ids_TK)
    assert all(len(set(row)) == 3 for row in first.topk_expert_ids_TK.tolist())
    assert_close_fp64(first.topk_weights_TK, torch.full((T, 3), 1 / 3, dtype=torch.float64), what="w")
    assert first.aux_loss == 0 and first.z_loss == 0
    same, other = make(router="hash", top_k=3), make(router="hash", top_k=3, seed=1)
    assert torch.equal(same(x, token_ids=ids)[1].topk_expert_ids_TK, first.topk_expert_ids_TK)
    assert not torch.equal(other(x, token_ids=ids)[1].topk_expert_ids_TK, first.topk_expert_ids_TK)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, token_ids=ids)[1].topk_expert_ids_TK, first.topk_expert_ids_TK)
    with pytest.raises(ConfigError, match="token_ids=None"):
        layer(x)


@pytest.mark.parametrize("num_experts", [1, 2, 7, 12, 64])
def test_hash_spreads_ids_evenly_and_every_k_is_distinct(num_experts):
    ids = torch.arange(20000) * 3 + 2**40
    chosen = hash_experts(ids, torch.tensor([5, 0]), num_experts, num_experts)
    assert torch.equal(chosen.sort(-1).values, torch.arange(num_experts).expand(20000, -1))
    counts = torch.bincount(chosen[:, 0], minlength=num_experts).double()
    expected = 20000 / num_experts
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < num_experts + 6 * (2 * num_experts) ** 0.5


def test_probability_of_being_chosen_is_what_noise_gives():
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0]], dtype=torch.float64)
    noise = torch.tensor([[0.3, -0.2, 0.4, 0.0]], dtype=torch.float64)
    ours = chosen_probability(logits, logits + noise, 2, 0.8)[0]
    noisy = (logits + noise)[0]
    draws = 200_000
    generator = torch.Generator().manual_seed(0)
    for e in range(4):
        others = noisy.tolist()
        others.pop(e)
        threshold = sorted(others)[-2]
        fresh = 0.8 * torch.randn(draws, generator=generator, dtype=torch.float64)
        hits = (logits[0, e] + fresh > threshold).double().mean().item()
        assert abs(hits - ours[e].item()) < 5 * (0.25 / draws) ** 0.5
    assert torch.equal(chosen_probability(logits, noisy[None], 4, 0.8), torch.ones_like(logits))


class LogitsRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, dtype=torch.float64)

    def forward(self, x_TD, token_ids_T=None):
        self.seen = token_ids_T
        return self.gate(x_TD)


class WholeRouter(nn.Module):
    def forward(self, x_TD, top_k, token_mask_T):
        ids = torch.arange(top_k).expand(len(x_TD), top_k).contiguous()
        return RouterOutput(ids, x_TD[:, :top_k].sigmoid())


def test_a_module_returning_logits_gets_the_layers_options():
    layer = make(router=LogitsRouter(), score_function="sigmoid", normalize_weights="none")
    x, ids = tokens(), torch.arange(T)
    stats = layer(x, token_ids=ids)[1]
    best = layer.router.gate(x).sigmoid().topk(2)
    assert torch.equal(stats.topk_expert_ids_TK, best.indices)
    assert_close_fp64(stats.topk_weights_TK, best.values, what="weights")
    assert torch.equal(layer.router.seen, ids)
    assert stats.aux_loss > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_returning_a_router_output_is_used_as_it_is(compiled):
    router = WholeRouter()
    router = torch.compile(router, backend="eager") if compiled else router
    layer, x = make(router=router), tokens()
    stats = layer(x, top_k=3)[1]
    assert torch.equal(stats.topk_expert_ids_TK, torch.arange(3).expand(T, 3))
    assert_close_fp64(stats.topk_weights_TK, x[:, :3].sigmoid(), what="weights")
    assert stats.aux_loss == 0 and stats.z_loss == 0


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(T, E + 1), "it must return logits of shape"),
        ("logits", "it must return logits of shape"),
        (RouterOutput(torch.zeros(T, 2), torch.zeros(T, 2)), "the ids int64"),
        (
            RouterOutput(torch.zeros(T, 2, dtype=torch.int64), torch.zeros(T, 2), torch.zeros(T, 3)),
            "scores of shape",
        ),
        (
            RouterOutput(torch.tensor([[0, -1]]).expand(T, 2), torch.zeros(T, 2)),
            "returned holds -1; it must be from 0 to 8",
        ),
    ],
)
def test_a_module_returning_something_else_is_told(result, message):
    class Wrong(nn.Module):
        def forward(self, x_TD):
            return result

    with pytest.raises(ConfigError, match=message):
        make(router=Wrong())(tokens())


@pytest.mark.parametrize("router", ["topk", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_computes_in_fp32_and_its_weight_stays_fp32(dtype, router):
    layer = make(dtype=dtype, router=router)
    assert layer.router.proj.weight.dtype == torch.float32
    assert layer.experts.w_in.dtype == dtype
    x = tokens(dtype=dtype)
    exact = copy.deepcopy(layer).double()
    ours, oracle = layer(x)[1], exact(x.double())[1]
    assert ours.topk_weights_TK.dtype == torch.float32
    assert torch.equal(ours.topk_expert_ids_TK, oracle.topk_expert_ids_TK)
    assert_weights(ours.topk_weights_TK, oracle.topk_weights_TK, what="weights")
    before = layer.router.proj.weight.clone()
    for cast in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
    ):
        cast(layer)
        assert torch.equal(layer.router.proj.weight, before)
    assert make(dtype=None).double().router.proj.weight.dtype == torch.float64


def test_balancing_bias_survives_a_cast_too():
    layer = make(dtype=torch.float32, bias_update_rate=1e-3)
    layer.expert_bias_E.fill_(1.001)
    layer.to(torch.bfloat16)
    assert layer.expert_bias_E.dtype == torch.float32
    assert torch.equal(layer.expert_bias_E, torch.full((E,), 1.001))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_linear_saves_x_in_its_own_dtype_and_is_exact(dtype):
    x, w = tokens(dtype=dtype).requires_grad_(), torch.randn(E, D, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits = router_linear(x, w)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), w.data_ptr()}
    grad = torch.randn(T, E)
    with torch.autocast("cpu", torch.bfloat16):  # a backward under autocast stays exact as well
        logits.backward(grad)
    x64, w64 = x.detach().double(), w.detach().double()
    for what, ours, a, b in (
        ("logits", logits.detach(), x64, w64.t()),
        ("dw", w.grad, grad.double().t(), x64),
        ("dx", x.grad, grad.double(), w64),
    ):
        plain, sums = (a.float() @ b.float()).to(ours.dtype), sums_of_product(a.float(), b.float())
        assert_two_times(ours, plain, a @ b, what=what, sums=sums)


def test_replay_of_routers_without_logits():
    x, ids = tokens(), torch.tensor([[1, E]]).expand(T, 2)
    hashed = make(router="hash")(x, token_ids=torch.arange(T), routing=Routing(ids))[1]
    assert torch.equal(hashed.topk_weights_TK, torch.tensor([[1.0, 0.0]]).double().expand(T, 2))

    class Scores(nn.Module):
        def forward(self, x_TD):
            scores = x_TD.new_full((len(x_TD), E), 1 / E)
            return RouterOutput(torch.zeros(len(x_TD), 1, dtype=torch.int64), scores[:, :1], scores)

    stats = make(router=Scores(), normalize_weights="none")(x, routing=Routing(ids))[1]
    assert torch.equal(stats.topk_weights_TK, torch.tensor([[1 / E, 0.0]]).double().expand(T, 2))


def test_router_linear_gradcheck_twice():
    x = tokens(5).requires_grad_()
    w = torch.randn(E, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(router_linear, (x, w))
    assert torch.autograd.gradgradcheck(router_linear, (x, w))
