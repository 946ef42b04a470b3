"""What moves: bytes equal the formulas, and nothing moves that the split does not ask for."""

import pytest
import torch
import torch.distributed as dist
from tests.support import spread_case
from tests.support.ranks import world_of
from tests.support.spread_case import D, E, SpreadCase, build, compare

from expertmesh.parallel.experts.dispatcher import spread_experts

ELEMENT = 8


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
    own = route.split.block(world.position)
    copies = sum(
        len({b for b in row if (b, q) != own}) for row in block_TK.tolist() for q in range(route.split.route_f)
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
    members = next(c for c in route.split.route_cells() if world.position in c)
    mine = route.split.block(world.position)[0]
    return sum(mine in set(row) for rank in members if rank != world.position for row in choices[rank])


def test_tokens_moved(four_ranks):
    """A token travels once to each rank that has one of its experts, not once per choice."""
    for spread in ({"es_degree": 1}, {"es_degree": 2}, {"route_degree": 2, "es_degree": 2}):
        for moved, expected in four_ranks.run(token_traffic, spread, {}):
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
