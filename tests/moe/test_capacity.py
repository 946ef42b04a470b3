"""Capacity and drop policies against a loop over queues; Random Token Selection is uniform."""

import itertools
import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh import MoELayer, Routing
from expertmesh.moe.capacity import (
    assign,
    capacity_of,
    exact_ratio,
)
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.routing_noise import STREAM_RANDOM_DROP, key_noise, random_bits


def ceil_capacity(num_tokens, top_k, num_experts, factor, min_capacity):
    return max(min_capacity, -(-(Fraction(str(factor)) * top_k * num_tokens) // num_experts))


def kept_by_loop(ids, keys, mask, *, num_experts, factor, min_capacity, group_size):
    """The definition: per routing group and expert, the C slots with the smallest (key, choice, token) stay."""
    num_tokens, top_k = ids.shape
    kept = torch.zeros_like(ids, dtype=torch.bool)
    size = group_size or max(num_tokens, 1)
    for start in range(0, num_tokens, size):
        members = [t for t in range(start, min(start + size, num_tokens)) if mask[t]]
        capacity = ceil_capacity(len(members), top_k, num_experts, factor, min_capacity)
        for e in range(num_experts):
            queue = [(keys[t][j], j, t) for t in members for j in range(top_k) if ids[t, j].item() == e]
            for _, j, t in sorted(queue)[:capacity]:
                kept[t, j] = True
    return kept


def run(ids, weights, *, num_experts, factor, policy, group_size=None, min_capacity=0, mask=None, **kw):
    return assign(
        Routing(ids, weights),
        num_experts=num_experts,
        factor=exact_ratio(factor),
        min_capacity=min_capacity,
        policy=policy,
        group_size=group_size,
        renormalize=kw.get("renormalize", False),
        token_mask_T=mask,
        noise_key=torch.tensor(kw.get("key", [1, 2])),
        token_index_T=torch.arange(len(ids)),
        layer_index=3,
    )


@settings(max_examples=120)
@given(st.data())
def test_every_policy_equals_the_loop(data):
    num_experts = data.draw(st.sampled_from([1, 2, 5, 7]))
    top_k = data.draw(st.integers(1, num_experts))
    num_tokens = data.draw(st.sampled_from([0, 1, 2, 9, 24]))
    factor = data.draw(st.sampled_from([0.1, 0.5, 1.0, 1.1, 1.25, 3.0]))
    min_capacity = data.draw(st.sampled_from([0, 1, 4]))
    group_size = data.draw(st.sampled_from([None, 1, 4, 7, 100]))
    policy = data.draw(st.sampled_from(["first", "priority", "weight", "random"]))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    skew = torch.rand(num_tokens, num_experts, generator=generator) ** 3
    skew[:, 0] += data.draw(st.sampled_from([0.0, 1.0]))
    ids = skew.topk(top_k).indices
    weights = torch.randint(1, 5, (num_tokens, top_k), generator=generator).double() / 4  # with ties
    mask = torch.rand(num_tokens, generator=generator) > 0.3
    ids = torch.where(mask[:, None], ids, num_experts)
    if policy == "first":
        keys = torch.zeros_like(weights)
    elif policy == "priority":  # choice by choice, tokens by their largest live weight
        largest = weights.masked_fill(ids == num_experts, -math.inf).amax(-1, keepdim=True)
        keys = 10 * torch.arange(top_k) - largest
    elif policy == "weight":
        keys = -weights
    else:
        keys = random_bits(
            torch.tensor([1, 2]),
            torch.arange(num_tokens),
            top_k,
            layer_index=3,
            stream=STREAM_RANDOM_DROP,
        )
    result = run(
        ids,
        weights,
        num_experts=num_experts,
        factor=factor,
        policy=policy,
        group_size=group_size,
        min_capacity=min_capacity,
        mask=mask,
    )
    kept = kept_by_loop(
        ids,
        keys.tolist(),
        mask,
        num_experts=num_experts,
        factor=factor,
        min_capacity=min_capacity,
        group_size=group_size,
    )
    assert torch.equal(result.expert_ids_TK, torch.where(kept, ids, num_experts))
    assert result.num_dropped == (ids < num_experts).sum() - kept.sum()
    assert result.max_rows is None or kept.sum() <= result.max_rows
    assert torch.equal(result.weights_TK, weights)


@given(st.integers(1, 2000), st.integers(1, 1000))
def test_every_simple_factor_is_exact(numerator, denominator):
    exact = Fraction(numerator, denominator)
    assert Fraction(*exact_ratio(numerator / denominator)) == exact


@given(st.floats(1e-4, 1e4))
def test_any_factor_is_close(factor):
    numerator, denominator = exact_ratio(factor)
    assert denominator <= 10**6
    assert abs(Fraction(numerator, denominator) - Fraction(factor)) * 10**6 <= 1


def test_capacity_is_not_rounded_up_by_floating_point():
    assert 1000 / 10 * 1.1 > 110, "a ceil in floating point would give 111"
    assert capacity_of(1000, 1, 10, exact_ratio(1.1), min_capacity=0) == 110
    on_device = capacity_of(torch.tensor([1000, 0, 3]), 1, 10, exact_ratio(1.1), min_capacity=2)
    assert on_device.tolist() == [110, 2, 2]


CHI_SQUARE_Z = 6  # chi-square has mean n and variance 2n; six sigma with a fixed seed never fails by chance


def chi_square_fits(counts, expected, freedom):
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return statistic < freedom + CHI_SQUARE_Z * (2 * freedom) ** 0.5


def test_random_token_selection_is_uniform_over_the_queue():
    """Every one of the 20 subsets of 3 out of 6 queueing tokens stays equally often, whatever their place."""
    draws, queue, capacity = 8000, 6, 3
    ids = torch.zeros(draws * queue, 1, dtype=torch.int64)  # each routing group is one draw
    kept = run(ids, torch.ones_like(ids), num_experts=1, factor=0.5, policy="random", group_size=queue).expert_ids_TK
    subsets = {s: i for i, s in enumerate(itertools.combinations(range(queue), capacity))}
    counts = torch.zeros(len(subsets), dtype=torch.float64)
    for row in (kept.view(draws, queue) == 0).tolist():
        counts[subsets[tuple(i for i, stays in enumerate(row) if stays)]] += 1
    assert chi_square_fits(counts, draws / len(subsets), len(subsets) - 1)


def test_random_token_selection_is_uniform_over_steps_tokens_and_choices():
    """First choices have no advantage over second and third ones, nor early tokens over late ones."""
    layer = layer_with(num_experts=3, top_k=3, capacity_factor=0.25, min_capacity=0, routing_group_size=16)
    repeats, steps, capacity = 300, 10, 4
    x = torch.randn(16, 6, dtype=torch.float64).repeat(repeats, 1)
    counts = torch.zeros(16, 3, dtype=torch.float64)
    for step in range(steps):
        key_noise(layer, seed=5, step=step)
        kept = _kept_slots(layer, x)
        counts += kept.view(repeats, 16, 3).sum(0)
    share = capacity / 16
    expected = repeats * steps * share
    # Each expert's queue holds all 16 tokens and keeps exactly 4 of them, a finite population: variance
    # n * share * (1 - share) * 16 / 15 with 15 degrees of freedom per expert.
    statistic = ((counts - expected) ** 2 / (expected * (1 - share))).sum().item() * 15 / 16
    assert statistic < 45 + CHI_SQUARE_Z * (2 * 45) ** 0.5


def _kept_slots(layer, x):
    """(T, K): which slots the layer hands to its dispatcher with an expert."""
    seen = []

    class Spy(LocalDispatcher):
        def start(self, tokens, way):
            seen.append(tokens.expert_ids_TK < layer.num_experts)
            return super().start(tokens, way)

    layer.dispatcher = Spy()
    layer(x)
    return seen[0]


def layer_with(**kwargs):
    options = {"dim": 6, "hidden_dim": 4, "num_experts": 4, "top_k": 2, "seed": 0} | kwargs
    return MoELayer(dtype=torch.float64, **options)


def dropped(layer, x, **kwargs):
    return layer(x, **kwargs)[1].num_dropped.item()


def test_training_and_evaluation_have_their_own_capacity_and_calls_their_own():
    layer, x = (
        layer_with(capacity_factor=0.5, eval_capacity_factor=0.25, min_capacity=0),
        torch.randn(64, 6, dtype=torch.float64),
    )
    # every expert is over capacity: the number of rows that stay is E * C
    assert dropped(layer, x) == 128 - 4 * 16
    layer.eval()
    assert dropped(layer, x) == 128 - 4 * 8
    assert dropped(layer, x, capacity_factor=0.125) == 128 - 4 * 4
    assert dropped(layer, x, capacity_factor=float("inf")) == 0
    assert dropped(layer, x) == 128 - 4 * 8, "an override must not stick"
    assert dropped(layer_with(capacity_factor=0.5).eval(), x) == 0


def test_max_capacity_bounds_a_dropless_layer():
    x = torch.randn(64, 6, dtype=torch.float64)
    assert dropped(layer_with(max_capacity_factor=0.25, min_capacity=0), x) == 128 - 4 * 8
    assert dropped(layer_with(max_capacity_factor=0.25, capacity_factor=0.5), x) == 128 - 4 * 8
    assert dropped(layer_with(max_capacity_factor=9.0), x) == 0
