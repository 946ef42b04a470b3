"""Ways that only calls without masks, gradients or compilers take: to the bit the general ones."""

from unittest.mock import patch

import pytest
import torch
from tests.support.calls import calls_of

from expertmesh.moe import assignment, selection
from expertmesh.moe.selection import SelectionOptions, scores_of, weights_at
from expertmesh.ops import route_metadata, router_linear


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize("weight_scale", [1.0, 2.5])
def test_weights_without_masks(score_function, normalize, weight_scale):
    options = SelectionOptions(
        num_experts=8, score_function=score_function, weight_scale=weight_scale
    )
    ids_TK = torch.rand(20, 8).topk(3).indices
    results = []
    for all_live in (False, True):
        torch.manual_seed(0)
        logits_TE = torch.randn(20, 8, requires_grad=True)
        weights_TK = weights_at(
            logits_TE,
            scores_of(logits_TE, options),
            ids_TK,
            normalize=normalize,
            options=options,
            all_live=all_live,
        )
        (grad,) = torch.autograd.grad(weights_TK.square().sum(), logits_TE)
        results.append((weights_TK, grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_choice_by_token_needs_no_masks():
    options = SelectionOptions(num_experts=8)
    with calls_of(weights_at) as calls:
        selection.choose_by_token(torch.randn(4, 8), 2, options=options)
    assert [variables["all_live"] for variables, _ in calls] == [True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_router_without_gradients_skips_the_operator(dtype):
    x_TD, w_ED = torch.randn(5, 16).to(dtype), torch.randn(8, 16, requires_grad=True)
    found = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), torch.profiler.profile() as profile:
            found.append(router_linear.router_linear(x_TD, w_ED))
        names = {event.name for event in profile.events()}
        assert ("expertmesh::router_linear" in names) == gradients
    seen, plain = found
    assert torch.equal(seen, plain)
    assert seen.requires_grad


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("group_size", [None, 4])
def test_choices_are_counted_alike(group_size, backend):
    class Subclass(torch.Tensor):
        """Of which nothing is known, so that the general way is taken."""

    ids_TK = torch.randint(0, 6, (11, 2))
    plain = assignment.count_choices(ids_TK, 5, group_size)
    with (
        patch.object(assignment, "resolve_backend", return_value=backend),
        patch.object(route_metadata, "resolve_backend", return_value=backend),
    ):
        general = assignment.count_choices(ids_TK.as_subclass(Subclass), 5, group_size)
    assert torch.equal(plain, general)
    assert plain.sum() == (ids_TK < 5).sum()
    assert plain.dtype == general.dtype == torch.int64
