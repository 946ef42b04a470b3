"""A layer spread over ranks equals the layer in one process: output, losses, counts and all gradients."""

import copy
import itertools
import random
import warnings
from functools import partial

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, relative_error
from tests.support.ranks import world_of
from tests.support.replicas import whole
from tests.support.spread_case import D, SpreadCase, build, compare, compare_all
from torch.distributed.fsdp import fully_shard

from expertmesh import MoELayer
from expertmesh.errors import ConfigError
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Fixed

LAYERS = {
    "gated": {},
    "plain_bias": {"activation": "gelu", "bias": True},
    "one_choice": {"top_k": 1, "activation": "geglu"},
    "four_choices": {"top_k": 4, "z_loss_weight": 0.1},
    "dense_parts": {"num_shared_experts": 1, "residual": True, "bias": True},
    "capacity_first": {"capacity_factor": 0.75, "min_capacity": 1, "drop_policy": "first"},
    "capacity_random": {"capacity_factor": 1.0, "min_capacity": 1, "router_noise": "gumbel"},
    "importance": {"balance_loss": "importance_load", "router_noise": "gaussian"},
    "expert_choice": {"router": "expert_choice"},
}
GROUPED = ("capacity_first", "capacity_random", "expert_choice")


def cases(num_ranks, tokens):
    """Each pair of degrees, and each way to keep weights, with some layer; other tokens, other plans."""
    divisors = [d for d in (1, 2, 4) if num_ranks % d == 0]
    plans, draw = list(itertools.product(divisors, divisors)), random.Random(sum(tokens))
    draw.shuffle(plans)
    keeps = itertools.cycle(("until_step", "until_backward", "regather"))
    for (name, layer), (route, es) in zip(LAYERS.items(), itertools.cycle(plans)):
        order = draw.choice(("slices_inner", "experts_inner"))
        spread = {"route_degree": route, "es_degree": es, "keep": next(keeps), "order": order}
        yield SpreadCase(layer, spread, tokens=tokens, group=8 if name in GROUPED else 1)


@pytest.mark.parametrize("tokens", [(5, 5), (7, 0)], ids=["equal", "zero"])
def test_two_ranks(two_ranks, tokens):
    two_ranks.run(compare_all, list(cases(2, tokens)))


@pytest.mark.parametrize("tokens", [(3, 3, 3, 3), (7, 4, 0, 9)], ids=["equal", "unequal"])
def test_four_ranks(four_ranks, tokens):
    four_ranks.run(compare_all, list(cases(4, tokens)))


def test_no_tokens_at_all(two_ranks):
    two_ranks.run(compare_all, [SpreadCase(tokens=(0, 0), spread={"route_degree": r}) for r in (1, 2)])


def test_copies_of_the_experts(four_ranks):
    plans = [{"num_replicas": 2, "route_degree": r, "es_degree": es} for r in (1, 2) for es in (1, 2)]
    layer = {"bias": True, "activation": "relu"}
    four_ranks.run(compare_all, [SpreadCase(layer, plan) for plan in plans])


def test_part_of_the_world(four_ranks):
    """Two worlds of two ranks each, side by side."""
    plans = [{"route_degree": r, "keep": k} for r in (1, 2) for k in ("until_backward", "regather")]
    four_ranks.run(compare_all, [SpreadCase(spread=plan, subset=True) for plan in plans])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(four_ranks, dtype):
    """The two-times rule against one process in the same precision; one choice, as ties may fall elsewhere."""
    spreads = [{"route_degree": r, "es_degree": es} for r, es in ((1, 1), (2, 2), (4, 1), (4, 2))]
    four_ranks.run(compare_all, [SpreadCase(spread=s, dtype=dtype) for s in spreads])


def test_fixed_exchange(four_ranks):
    spreads = [{"route_degree": r, "es_degree": 2, "exchanges": partial(Fixed, bound=9)} for r in (1, 2, 4)]
    four_ranks.run(compare_all, [SpreadCase(LAYERS["four_choices"], s) for s in spreads])


def changed_in_place_behind_fsdp():
    """The user's own FSDP2 around the layer, and `y += x` around that."""
    layer = MoELayer(dim=7, hidden_dim=6, num_experts=4, top_k=2, seed=0)
    whole = copy.deepcopy(layer)
    fully_shard(layer)
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    for one in (whole, layer):
        with warnings.catch_warnings(action="error"):
            y, _ = one(x)
        y += x
        y.square().sum().backward()
    for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


def test_an_output_behind_fsdp_may_be_changed_in_place(two_ranks):
    two_ranks.run(changed_in_place_behind_fsdp)


def twice(case, changed):
    """Gradients of one backward and of two through the same graph, in a layer or in what is made of it."""
    layer = build(case, torch.float64)
    spread_experts(layer, world_of(), **case.spread)
    layer = changed(layer)
    x = torch.ones(3, D, dtype=torch.float64)
    found = []
    for count in (0, 1, 2):  # the first says which experts are hot
        layer.zero_grad()
        with warnings.catch_warnings(action="ignore"):  # of the compiler
            y = layer(x)[0].sum()
        for _ in range(count):
            y.backward(retain_graph=True)
        found.append({n: whole(p.grad) for n, p in layer.named_parameters() if count})
    return found[1:]


def compiled(layer):
    return torch.compile(layer, backend="eager")


@pytest.mark.parametrize("changed", [copy.deepcopy, pytest.param(compiled, marks=pytest.mark.slow)])
def test_a_graph_may_be_gone_through_twice_in_copies_and_compiled_models(two_ranks, changed):
    layer, spread = (
        {"bias": True, "aux_loss_weight": 0.0},
        {"replicated_experts": 2, "es_degree": 2},
    )
    for once, both in two_ranks.run(twice, SpreadCase(layer, spread), changed):
        for name, grad in once.items():
            assert relative_error(both[name], 2 * grad) <= FP64_RELATIVE, name


def _refused(spread, adapters, words):
    with pytest.raises(ConfigError, match=words):
        compare(SpreadCase(spread=spread, adapters=adapters))


BIASES = [{}, {"activation": "gelu", "bias": True, "num_shared_experts": 1}]
TARGETS = {"rank": 2, "targets": ("experts", "w_in")}
ADAPTED = [
    {},
    {"overlap_degree": 2},
    {"es_degree": 2},
    {"route_degree": 1},
    {"num_replicas": 2},
    {"es_degree": 2, "route_degree": 1},
]


@pytest.mark.parametrize("bias", BIASES, ids=len)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_low_rank_adapters_spread_like_their_experts(two_ranks, bias, shared):
    adapters = {**TARGETS, "shared": shared}
    cases = [SpreadCase(bias, spread, adapters=adapters) for spread in ADAPTED]
    idle = [SpreadCase(spread=s, tokens=(1, 0), adapters=adapters) for s in ({}, {"es_degree": 2})]
    two_ranks.run(compare_all, [*cases, *idle])


def test_low_rank_adapters_where_some_weights_are_gathered(four_ranks):
    spreads = [{"route_degree": 2, "es_degree": es} for es in (1, 2, 4)]
    spreads += [{"num_replicas": 2, "es_degree": 2}]
    four_ranks.run(compare_all, [SpreadCase(spread=s, adapters=TARGETS) for s in spreads])


def test_low_rank_adapters_that_cannot_spread_are_refused(two_ranks):
    for spread, words in (
        ({"replicated_experts": 4}, "replicated_experts=4 with low-rank adapters: they stay"),
        ({"offload": True}, "offload=True with low-rank adapters"),
    ):
        two_ranks.run(_refused, spread, {"rank": 2}, words)
