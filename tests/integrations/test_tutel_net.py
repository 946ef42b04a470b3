"""Tutel's collectives, groups, optimizer and layers of one's own on two ranks, against the same on one."""

import pytest
import torch
import torch.distributed as dist

from expertmesh.integrations.tutel import moe, net

RANKS = 2


def given(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pieces_of_different_sizes():
    """Results of the exchanges whose pieces differ between ranks, beside what they should be."""
    rank = net.get_world_rank()
    first, second = ([given(10 * i + r, 3 + r) for r in range(RANKS)] for i in range(2))
    gathered, sizes = net.batch_all_gather_v([first[rank], second[rank]])
    yield gathered[0], torch.cat(first)
    yield gathered[1], torch.cat(second)
    yield sizes, torch.tensor([3, 4])
    sent = [given(20 + r, 3, 2) for r in range(RANKS)]
    (got,), arriving = net.batch_all_to_all_v([sent[rank]], [2, 4])
    yield got, torch.cat([s.reshape(-1).split([2, 4])[rank] for s in sent])
    yield arriving, torch.tensor([(2, 4)[rank]] * RANKS)


def slices_of_parameters():
    """Parameters put together from the ranks' slices, beside the parameters."""
    for shape in ((3, 5), (4,), ()):
        whole = given(0, *shape)
        piece, full_shape = net.zero_scatter(whole, net.simple_split)
        yield net.zero_gather(piece, full_shape), whole
    yield (
        net.zero_gather(given(net.get_world_rank(), 2, 3)),
        torch.cat([given(r, 2, 3) for r in range(RANKS)]),
    )


def exchanged(kind):
    for got, expected in kind():
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", [pieces_of_different_sizes, slices_of_parameters])
def test_exchanges(two_ranks, kind):
    two_ranks.run(exchanged, kind)


def groups():
    """Ranks of the groups that each way of making them gives."""
    ways = {
        "standalone": net.create_standalone_group(),
        "one model group": net.create_groups_from_world(1).model_group,
        "two model groups": net.create_groups_from_world(2).model_group,
        "two data groups": net.create_groups_from_world(-1).data_group,
    }
    assert net.create_groups_from_world(2) is net.create_groups_from_world(-1)
    return {name: dist.get_process_group_ranks(group) for name, group in ways.items()}


def test_groups(two_ranks):
    for rank, found in enumerate(two_ranks.run(groups)):
        assert found == {
            "standalone": [rank],
            "one model group": [0, 1],
            "two model groups": [rank],
            "two data groups": [0, 1],
        }


def learned(shapes, steps=2):
    """Parameters after steps of the sharded optimizer, whose gradients are those of the ranks."""
    rank = net.get_world_rank()
    params = [torch.nn.Parameter(given(0, *shape)) for shape in shapes]
    optimizer = net.TutelDistributedOptimizer(params, average_shared=True)
    optimizer.warp_local(torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        sum((p * given(100 * step + rank, *p.shape)).sum() for p in params).backward()
        optimizer.step()
    return [p.detach() for p in params]


def test_the_sharded_optimizer_learns_what_a_whole_one_learns(two_ranks):
    shapes = [(3, 5), (4,), ()]
    params = [torch.nn.Parameter(given(0, *shape)) for shape in shapes]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for step in range(2):
        for p in params:
            p.grad = sum(given(100 * step + rank, *p.shape) for rank in range(RANKS)) / RANKS
        optimizer.step()
    for found in two_ranks.run(learned, shapes):
        torch.testing.assert_close(found, [p.detach() for p in params])


def own_layer():
    """Output, gradient of the input and of the experts of a layer with two gates."""
    gate = {"type": "top", "k": 2, "capacity_factor": 0}
    experts = {"type": "ffn", "num_experts_per_device": 4 // net.get_world_size(), "hidden_size_per_expert": 6}
    layer = moe.moe_layer([gate, gate], 8, experts, seeds=(1, 2, 3)).double()
    first = net.get_world_rank() * (4 // net.get_world_size())
    with torch.no_grad():
        for n, (_, p) in enumerate(layer.get_parameter_iterator("local_experts")):
            p.copy_(given(n, 4, *p.shape[1:])[first:][: len(p)])
    x = given(net.get_world_rank(), 6, 8).requires_grad_()
    if net.get_world_size() == 1:
        x = torch.cat([given(rank, 6, 8) for rank in range(RANKS)]).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    owned = [p.grad for _, p in layer.get_parameter_iterator("local_experts")]
    return y.detach(), x.grad, owned


def test_a_layer_of_ones_own_computes_the_same_on_two_ranks(two_ranks):
    y, grad, owned = own_layer()
    outputs, grads, parts = zip(*two_ranks.run(own_layer), strict=True)
    torch.testing.assert_close(torch.cat(outputs), y)
    torch.testing.assert_close(torch.cat(grads), grad)
    for both, whole in zip(zip(*parts, strict=True), owned, strict=True):
        torch.testing.assert_close(torch.cat(both), whole)
