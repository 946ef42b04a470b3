"""The fused choice of experts: ids equal to a stable sort, weights, scores and gradients by the two-times rule."""

import itertools

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.poison import poisoned_empty

from expertmesh.kernels import topk as kernels
from expertmesh.kernels.topk import SelectionRule
from expertmesh.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = ["softmax", "sigmoid", "softmax_after_topk"]
# tokens, experts, K, groups, limited groups
SHAPES = [
    (0, 4, 2, 1, 1),
    (1, 1, 1, 1, 1),
    (7, 7, 7, 1, 1),
    (40, 61, 8, 1, 1),
    (9, 128, 1, 1, 1),
    (11, 24, 4, 3, 2),
    (5, 32, 8, 8, 4),
    (6, 6, 2, 6, 3),
]
SLOW_SHAPES = [
    (1000, 64, 8, 1, 1),
    (128, 257, 16, 1, 1),
    (128, 1024, 32, 1, 1),
    (3, 1024, 1024, 1, 1),
    (128, 256, 8, 8, 4),
    (128, 160, 6, 8, 3),
    (7, 2000, 2, 1, 1),
]
ALL_SHAPES = SHAPES + [pytest.param(shape, marks=pytest.mark.exhaustive) for shape in SLOW_SHAPES]


def plain(logits, ids, rule, dtype, d_weights, d_scores):
    """(weights, scores, d_logits) in torch and a dtype, at given ids."""
    x = logits.to(dtype).requires_grad_()
    weights, scores = reference.weigh_experts(
        x,
        ids,
        score_function=rule.score_function,
        normalize=rule.normalize,
        weight_scale=rule.weight_scale,
    )
    total = (weights * d_weights.to(dtype)).sum() + (scores * d_scores.to(dtype)).sum()
    (d_logits,) = torch.autograd.grad(total, x)
    return weights.detach(), scores.detach(), d_logits


def stable_choice(logits, top_k, rule, noise=None, bias=None):
    return reference.choose_experts(
        logits,
        top_k,
        score_function=rule.score_function,
        noise_TE=noise,
        bias_E=bias,
        num_expert_groups=rule.num_expert_groups,
        num_limited_groups=rule.num_limited_groups,
        group_score="max" if rule.num_group_scores == 1 else "top2_sum",
    )


def assert_choice(logits, top_k, rule, noise=None, bias=None):
    with poisoned_empty():
        ids, weights, scores = kernels.choose(logits, top_k, rule, noise_TE=noise, bias_E=bias)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, stable_choice(logits, top_k, rule, noise, bias))
    d_weights, d_scores = torch.randn_like(weights), torch.randn_like(scores)
    with poisoned_empty():
        d_logits = kernels.choose_backward(logits, ids, rule, d_weights, d_scores)
    same, oracle = (plain(logits, ids, rule, dtype, d_weights, d_scores) for dtype in (torch.float32, torch.float64))
    names = ("weights", "scores", "d_logits")
    for ours, a, b, what in zip((weights, scores, d_logits), same, oracle, names, strict=True):
        assert_two_times(ours, a, b, what=what)


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_choice_weights_scores_and_gradient(shape, function):
    num_tokens, num_experts, top_k, groups, limit = shape
    logits = 2 * torch.randn(num_tokens, num_experts, device=DEVICE)
    noise = torch.randn_like(logits)
    bias = torch.randn(num_experts, device=DEVICE)
    for normalize, noise_TE, bias_E in (
        (True, None, None),
        (False, noise, None),
        (True, noise, bias),
    ):
        rule = SelectionRule(function, normalize, 2.5, groups, limit)
        assert_choice(logits, top_k, rule, noise_TE, bias_E)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("groups", "limit"), [(1, 1), (4, 2)])
def test_ties_go_to_the_lower_expert(function, groups, limit):
    logits = torch.randint(-1, 2, (30, 16), device=DEVICE).float()
    logits[0], logits[1, ::2], logits[2, 3:9] = 0.0, -0.0, torch.inf
    rule = SelectionRule(function, True, 1.0, groups, limit)
    ids, *_ = kernels.choose(logits, 5, rule)
    expected = stable_choice(logits, 5, rule)
    rows = [t for t in range(30) if t != 2 or groups == 1]  # softmax of inf is NaN
    assert torch.equal(ids[rows], expected[rows])
    assert ids[0].tolist() == [0, 1, 2, 3, 4]


def test_bad_logits_give_valid_ids():
    logits = torch.randn(6, 10, device=DEVICE)
    logits[0], logits[1, 4], logits[2], logits[3, 2:] = torch.nan, torch.nan, -torch.inf, -torch.inf
    for function, groups in itertools.product(FUNCTIONS, (1, 5)):
        ids, *_ = kernels.choose(logits, 4, SelectionRule(function, True, 1.0, groups, groups))
        assert all(len(set(row)) == 4 and set(row) <= set(range(10)) for row in ids.tolist())
    ids, *_ = kernels.choose(logits, 1, SelectionRule("softmax", True))
    assert ids[1].item() == 4  # as torch.topk, NaN is largest


def test_extreme_logits():
    logits = torch.tensor([[200.0, -200.0, 0.0, 90.0], [-1e30, 1e30, 3.0, 3.0]], device=DEVICE)
    for function in FUNCTIONS:
        for normalize in (True, False):
            assert_choice(logits, 2, SelectionRule(function, normalize))
    # every chosen score underflows to 0: the sum is clamped, nothing becomes NaN
    ids, weights, scores = kernels.choose(logits - 1e3, 2, SelectionRule("sigmoid", True))
    grad = kernels.choose_backward(logits - 1e3, ids, SelectionRule("sigmoid", True), weights, scores)
    assert bool(weights[0].isfinite().all() and grad[0].isfinite().all())


def test_missing_gradients_are_zero():
    logits = torch.randn(9, 12, device=DEVICE)
    rule = SelectionRule("sigmoid", True)
    ids, weights, scores = kernels.choose(logits, 3, rule)
    zero_w, zero_s = torch.zeros_like(weights), torch.zeros_like(scores)
    d_w, d_s = torch.randn_like(weights), torch.randn_like(scores)
    for a, b in (
        ((d_w, None), (d_w, zero_s)),
        ((None, d_s), (zero_w, d_s)),
        ((None, None), (zero_w, zero_s)),
    ):
        one = kernels.choose_backward(logits, ids, rule, *a)
        assert torch.equal(one, kernels.choose_backward(logits, ids, rule, *b))
