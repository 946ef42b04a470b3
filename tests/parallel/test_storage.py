"""What the ranks hold at rest, and how long gathered weights live."""

import pytest
import torch
from tests.support.replicas import world_of
from tests.support.spread_case import D, SpreadCase, build
from torch.distributed.tensor import DTensor

from expertmesh.comm.world import World
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.recipes import RECIPES
from expertmesh.training.optim import build_optimizer

PARTS = 3  # gradients and two moments are as large as the parameters
STEP_COUNTER_BYTES = 4


def local_bytes(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def bytes_at_rest(changes):
    """Parameters, gradients and optimiser state of this rank after a step, and the parameters of the whole model."""
    config = RECIPES["gpt-moe-test"]().updated(changes)
    model = GPT(config.model, seed=0)
    whole = sum(p.nbytes for p in model.parameters())
    world = World()
    parallelize_gpt(model, config.parallel, world=world)
    optimizer = build_optimizer(model, config.optim)
    follow_optimizer(model, optimizer)
    model(torch.zeros(1, 16, dtype=torch.int64)).logits_BSV.square().sum().backward()
    gradients = sum(local_bytes(p.grad) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    parameters = sum(local_bytes(p) for p in model.parameters())
    state = sum(local_bytes(t) for s in optimizer.state.values() for t in s.values())
    state -= STEP_COUNTER_BYTES * len(optimizer.state)
    world.close()
    return whole, parameters + gradients + state


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("copies", [1, 2])
def test_every_rank_holds_its_part(four_ranks, stage, copies):
    """(Parameters + gradients + moments) / dp_shard, within 2%, whatever the stage."""
    changes = {"parallel.zero_stage": stage, "parallel.dp_replicate_degree": copies}
    for whole, held in four_ranks.run(bytes_at_rest, changes):
        assert held == pytest.approx((1 + PARTS) * whole * copies / 4, rel=0.02)


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

    torch.autograd.graph.saved_tensors_hooks = (
        counted  # the storage's own hooks hide these from others
    )
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
