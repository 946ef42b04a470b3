"""What moves: bytes equal the formulas, and nothing moves that the plan does not ask for."""

import pytest
import torch
import torch.distributed as dist
from tests.support import spread_case
from tests.support.replicas import world_of
from tests.support.spread_case import D, E, F, SpreadCase, build, compare

from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.testing.numerics import FP64_RELATIVE, relative_error

ELEMENT = 8
PARAMETERS = E * F * D * 3  # SwiGLU: gate, up and out


def weight_bytes(transfers):
    return sum(t.num_bytes for t in transfers if "weight" in t.where)


def weight_traffic(route_degree, es_degree, keep):
    spread = {"route_degree": route_degree, "es_degree": es_degree, "keep": keep}
    return weight_bytes(compare(SpreadCase(spread=spread)))


@pytest.mark.parametrize("es_degree", [1, 2])
def test_weights_moved(four_ranks, es_degree):
    """Each gather brings a rank the shards of W / r - 1 others; the gradient goes back once."""
    for route_degree in (1, 2, 4):
        for keep, gathers in (("until_backward", 1), ("regather", 2)):
            expected = (gathers + 1) * (4 // route_degree - 1) * (PARAMETERS // 4) * ELEMENT
            moved = four_ranks.run(weight_traffic, route_degree, es_degree, keep)
            assert moved == [expected] * 4


def token_traffic(spread, call):
    """Bytes of token rows sent by this rank, and what they should be, counted from the choices."""
    case = SpreadCase({"top_k": 4, "aux_loss_weight": 0.0}, spread, call)
    transfers = compare(case)
    moved = sum(t.num_bytes for t in transfers if "dispatch" in t.where or "combine" in t.where)
    world = world_of()
    layer = build(case, torch.float64)
    x, _ = spread_case._inputs(sum(case.tokens))
    first = sum(case.tokens[: world.position])
    rows = slice(first, first + case.tokens[world.position])
    _, stats = layer(x[rows], token_index=torch.arange(rows.start, rows.stop), **call)
    dispatcher = spread_experts(build(case, torch.float64), world, **spread)
    route = dispatcher.exchange().route
    K = stats.topk_expert_ids_TK.shape[1]
    block_TK = stats.topk_expert_ids_TK // route.num_local
    own = route.plan.block(world.position)
    copies = sum(
        len({b for b in row if (b, q) != own})
        for row in block_TK.tolist()
        for q in range(route.plan.route_f)
    )
    # Each way, in the forward and in the backward: rows of D, and with those that go out 2 K ids and weights.
    one_way = ELEMENT * (2 * D + 2 * K)
    num_counts = 2 * (route.group.size - 1)
    expected = one_way * (copies + received_rows(block_TK, route, world)) + 8 * num_counts
    return moved, expected


def received_rows(block_TK, route, world):
    """Rows that this rank gets from others: gathered from all ranks' choices."""
    choices = [None] * world.size
    dist.all_gather_object(choices, block_TK.tolist())
    members = next(c for c in route.plan.route_cells() if world.position in c)
    mine = route.plan.block(world.position)[0]
    return sum(
        mine in set(row) for rank in members if rank != world.position for row in choices[rank]
    )


def test_tokens_moved(four_ranks):
    """A token travels once to each rank that has one of its experts, not once per choice."""
    for spread in ({"es_degree": 1}, {"es_degree": 2}, {"route_degree": 2, "es_degree": 2}):
        for moved, expected in four_ranks.run(token_traffic, spread, {}):
            assert moved == expected


def switch_every_step(seed, steps):
    """One layer, another plan, K and capacity on each step, with updates; the same in one process."""
    world = world_of()
    case = SpreadCase(group=8)
    whole, spread = build(case, torch.float64), build(case, torch.float64)
    spread_experts(spread, world, es_degree=2)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (whole, spread)]
    draw = torch.Generator().manual_seed(seed)
    position, errors, moved, expected = world.position, [], 0, 0
    for _ in range(steps):
        route, top_k, factor = (int(torch.randint(0, 3, (), generator=draw)) for _ in range(3))
        call = {"top_k": 1 + top_k, "capacity_factor": (0.5, 1.0, float("inf"))[factor]}
        x = torch.randn(4 * 8, D, dtype=torch.float64, generator=draw)
        mine = slice(8 * position, 8 * position + 8)
        index = torch.arange(32)
        y, _ = whole(x, token_index=index, **call)
        y.square().sum().backward()
        with world.traffic.logged() as log:
            z, _ = spread(x[mine], token_index=index[mine], route_degree=2**route, **call)
            z.square().sum().backward()
        moved += weight_bytes(log.transfers)
        expected += 2 * (4 // 2**route - 1) * (PARAMETERS // 4) * ELEMENT
        for parameter in (p for n, p in spread.named_parameters() if not n.startswith("experts.")):
            dist.all_reduce(parameter.grad)
        errors.append(relative_error(z, y[mine]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(errors), moved, expected


def test_switching_plans_moves_nothing_else(four_ranks):
    for error, moved, expected in four_ranks.run(switch_every_step, 4, 30):
        assert error <= FP64_RELATIVE
        assert moved == expected


def sums_of_statistics(layer, call):
    """Bytes of each sum over ranks."""
    case = SpreadCase(layer, call=call)
    return [t.num_bytes for t in compare(case) if "statistics" in t.where]


@pytest.mark.parametrize(
    ("layer", "call", "sums"),
    [
        ({"aux_loss_weight": 0.0}, {}, [8 * E]),
        ({"aux_loss_weight": 0.0}, {"capacity_factor": 0.5}, [8 * E, 8]),
    ],
    ids=["dropless", "capacity"],
)
def test_what_cannot_be_dropped_is_not_counted(two_ranks, layer, call, sums):
    """Each of two ranks hands the other what it has counted: choices per expert, and rows dropped where rows can be."""
    assert two_ranks.run(sums_of_statistics, layer, call) == [sums] * 2
