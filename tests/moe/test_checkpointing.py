"""Selective checkpointing keeps the choice of experts: recomputation never routes differently."""

import pytest
import torch
from tests.support.operators import Operators
from torch.utils.checkpoint import checkpoint

from expertmesh import MoELayer
from expertmesh.functional import routing_checkpoint_contexts
from expertmesh.moe.checkpointing import CHOOSING_OPERATORS

T, D, F, E, K = 40, 16, 24, 6, 2
OPTIONS = {
    "plain": {},
    "noise": {"router_noise": "gumbel", "capacity_factor": 1.0},
    "groups": {"score_function": "sigmoid", "num_expert_groups": 3, "num_limited_groups": 2},
    "priority": {"capacity_factor": 0.8, "drop_policy": "priority", "min_capacity": 1},
    "expert_choice": {"router": "expert_choice"},
    "triton": {"backend": "triton"},
}


def make(name):
    return MoELayer(dim=D, hidden_dim=F, num_experts=E, top_k=K, seed=0, **OPTIONS[name])


def tokens():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


def loss_of(result):
    y, stats = result
    return y.square().sum() + stats.aux_loss


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_that_chooses_runs_again_and_gradients_are_the_same(name):
    layer, x = make(name), tokens()
    torch.manual_seed(7)
    loss_of(layer(x)).backward()
    expected = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    again = tokens()
    torch.manual_seed(7)
    kwargs = {"use_reentrant": False, "context_fn": routing_checkpoint_contexts}
    with Operators() as forward:
        loss = loss_of(checkpoint(layer, again, **kwargs))
    with Operators() as backward:
        loss.backward()
    assert CHOOSING_OPERATORS & set(forward.ran)
    assert not CHOOSING_OPERATORS & set(backward.ran)
    assert torch.ops.expertmesh.moe_mlp.default in backward.ran  # the rest is computed again
    found = [again.grad, *(p.grad for p in layer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def routings_of(layer, x, **kwargs):
    """The choices of the forward and of the recomputation, when the router changes in between."""
    seen = []

    def run(tokens_TD):
        y, stats = layer(tokens_TD)
        seen.append(stats.topk_expert_ids_TK)
        return y.square().sum()

    loss = checkpoint(run, x, use_reentrant=False, **kwargs)
    with torch.no_grad():
        layer.router.proj.weight.neg_()
    loss.backward()
    return seen


def test_a_router_that_changed_chooses_the_same_experts():
    first, second = routings_of(make("plain"), tokens(), context_fn=routing_checkpoint_contexts)
    assert torch.equal(first, second)
    first, second = routings_of(make("plain"), tokens())
    assert not torch.equal(first, second)  # what the policy prevents


@pytest.mark.parametrize("as_tensors", [False, True])
def test_losses_that_a_reentrant_checkpoint_cuts_off_are_told(as_tensors):
    layer, x = make("plain"), tokens()

    def run(x):
        y, stats = layer(x)
        return (y, stats.aux_loss) if as_tensors else (y, stats)

    with pytest.warns(UserWarning, match=r"use_reentrant=True\): the losses .* have no gradient"):
        _, found = checkpoint(run, x, use_reentrant=True)
    assert (found if as_tensors else found.aux_loss).requires_grad == as_tensors


def test_no_other_forward_without_gradients_warns():
    layer, x = make("plain"), tokens()
    with torch.no_grad():
        layer(x)
        checkpoint(layer, x, use_reentrant=False)
    layer.eval()
    checkpoint(layer, x, use_reentrant=True)


def test_compiled():
    layer = make("plain")

    def block(x):
        kwargs = {"use_reentrant": False, "context_fn": routing_checkpoint_contexts}
        return checkpoint(lambda t: layer(t)[0], x, **kwargs)

    x = tokens()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(x).square().sum(), x)
    (theirs,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    assert torch.equal(ours, theirs)
