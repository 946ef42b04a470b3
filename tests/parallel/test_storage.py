"""How long gathered weights live, and the buffers of their gradients."""

import pytest
import torch
from tests.support.ranks import world_of
from tests.support.spread_case import D, SpreadCase, build

from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.experts.dispatcher import spread_experts


def gathers(keep, follows, optimizer_of):
    """Gathers of weights in each of four micro-batches, two steps of two."""
    world = world_of()
    layer = build(SpreadCase(), torch.float64)
    spread_experts(layer, world, route_degree=1, keep=keep)
    optimizer = optimizer_of(layer)
    if follows:
        follow_optimizer(layer, optimizer)
    counts = []
    for micro_batch in range(4):
        with world.traffic.logged() as log:
            layer(torch.ones(2, D, dtype=torch.float64))[0].sum().backward()
        counts.append(sum(t.collective == "all_gather" for t in log.transfers))
        if micro_batch % 2:
            optimizer.step()
    return counts


def trained_after_inference():
    layer = build(SpreadCase(), torch.float64)
    spread_experts(layer, world_of(), route_degree=1, keep="until_step")
    follow_optimizer(layer, fused(layer))
    x = torch.ones(2, D, dtype=torch.float64)
    with torch.inference_mode():
        layer(x)
    layer(x)[0].sum().backward()


def test_weights_that_inference_mode_gathered_are_not_kept(two_ranks):
    two_ranks.run(trained_after_inference)


def fused(layer):
    return torch.optim.AdamW(layer.experts.parameters(), fused=True)


PARAMETERS = 2  # w_in and w_out


@pytest.mark.parametrize(
    ("keep", "follows", "expected"),
    [
        ("until_step", True, [1, 0, 1, 0]),
        ("until_step", False, [1, 1, 1, 1]),
        ("until_backward", True, [1, 1, 1, 1]),
        ("regather", True, [2, 2, 2, 2]),
    ],
)
def test_lifetime_of_gathered_weights(two_ranks, keep, follows, expected):
    for counts in two_ranks.run(gathers, keep, follows, fused):
        assert counts == [PARAMETERS * n for n in expected]


def saved_bytes(keep):
    """Bytes that autograd keeps between forward and backward, by storage, and those of the whole weights."""
    world = world_of()
    layer = build(SpreadCase(), torch.float32)
    whole = sum(p.nbytes for p in layer.experts.parameters())
    spread_experts(layer, world, route_degree=1, keep=keep)
    found, hooks = {}, torch.autograd.graph.saved_tensors_hooks

    def counted(pack, unpack):
        def counting(tensor):
            packed = pack(tensor)
            if isinstance(packed, torch.Tensor):
                found[packed.untyped_storage().data_ptr()] = packed.untyped_storage().nbytes()
            return packed

        return hooks(counting, unpack)

    torch.autograd.graph.saved_tensors_hooks = counted  # the storage's own hooks hide these from others
    try:
        with counted(lambda tensor: tensor, lambda tensor: tensor):
            y, _ = layer(torch.ones(2, D))
    finally:
        torch.autograd.graph.saved_tensors_hooks = hooks
    y.sum().backward()
    return sum(found.values()), whole


def test_regather_keeps_no_weights(two_ranks):
    for (kept, weights), (dropped, _) in zip(
        two_ranks.run(saved_bytes, "until_backward"),
        two_ranks.run(saved_bytes, "regather"),
        strict=True,
    ):
        assert kept - dropped == weights


def after_gradients_of_tokens(spread):
    """Gradients of the experts after a backward that asked for those of the tokens alone, and without one."""
    found = []
    for asks_before in (False, True):
        layer = MoELayer(dim=4, hidden_dim=4, num_experts=4, top_k=2, seed=0)
        spread_experts(layer, world_of(), **spread)
        x = torch.ones(6, 4).cumsum(0).requires_grad_()
        layer(x)  # so that there are hot experts
        loss = layer(x)[0].square().sum()
        if asks_before:
            torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        found.append([parameter.grad.to_local() for parameter in layer.experts.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("spread", [{"es_degree": 2, "route_degree": 1}, {"replicated_experts": 2}], ids=str)
def test_gradients_of_tokens_alone_leave_nothing_behind(two_ranks, spread):
    assert two_ranks.run(after_gradients_of_tokens, spread) == [True, True]
