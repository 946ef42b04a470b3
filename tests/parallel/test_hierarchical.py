"""The hierarchical exchange is exact on nodes of any shape, and a token crosses to a node once."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import world_of
from tests.support.spread_case import D, E, SpreadCase, build, compare

from expertmesh.comm.world import World
from expertmesh.errors import ConfigError
from expertmesh.moe.dispatch import Dispatched
from expertmesh.parallel.experts import dispatcher
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.exchange import Ragged
from expertmesh.parallel.experts.hierarchical import Hierarchical

TOKENS = (7, 4, 0, 9, 1, 0, 5, 2)
SHAPES = {"2x2": (0, 0, 1, 1), "3+1": (0, 0, 0, 1), "strided": (0, 1, 0, 1), "1+2+1": (0, 1, 1, 2)}
EIGHT = {"4x2": (0, 0, 1, 1, 2, 2, 3, 3), "5+3": (0, 0, 0, 0, 0, 1, 1, 1)}
SPREADS = [{}, {"es_degree": 2}, {"es_degree": 2, "overlap_degree": 3}, {"route_degree": 2}]


def exact(nodes, spreads, tokens, piece_bytes=dispatcher.PIECE_BYTES, dtype=torch.float64):
    with mock.patch.object(dispatcher, "PIECE_BYTES", piece_bytes):
        for spread in spreads:
            way = spread | {"all_to_all": "hierarchical", "nodes": nodes}
            compare(SpreadCase({"top_k": 3}, way, tokens=tokens, dtype=dtype))


@pytest.mark.parametrize("nodes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [TOKENS, (0,) * 8, (0, 1, 0, 0)], ids=str)
def test_nodes_of_four_ranks(four_ranks, nodes, tokens):
    four_ranks.run(exact, nodes, SPREADS, tokens)


@pytest.mark.parametrize("nodes", SHAPES.values(), ids=SHAPES)
def test_tokens_cross_in_chunks(four_ranks, nodes):
    """Chunks without tokens included, and chunks of parts."""
    four_ranks.run(exact, nodes, [{}, {"overlap_degree": 2}], TOKENS, 64)


@pytest.mark.parametrize("nodes", EIGHT.values(), ids=EIGHT)
def test_nodes_of_eight_ranks(eight_ranks, nodes):
    eight_ranks.run(exact, nodes, [{"num_replicas": 2}, {"overlap_degree": 2}], TOKENS)


def test_sums_inside_a_node_are_as_exact_as_one_process(four_ranks):
    four_ranks.run(exact, SHAPES["2x2"], [{}], TOKENS, dtype=torch.bfloat16)


def bytes_across(nodes):
    """What one rank sends across, out and home and both gradients, and the copies of tokens that should cross."""
    world, rank = world_of(False), dist.get_rank()
    layer = build(SpreadCase(), torch.float64)
    exchange = spread_experts(layer, world, all_to_all="hierarchical", nodes=nodes).exchange()
    assert type(exchange) is Hierarchical
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.stack([torch.randperm(E + 1, generator=generator)[:3] for _ in range(20)])
    x_TD = torch.randn(20, D, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(20, 3, dtype=torch.float64, requires_grad=True)
    with world.traffic.logged() as log:
        (dispatch_handle,) = exchange.start_parts(Dispatched(x_TD, ids_TK, weights_TK), 1, num_chunks=3)
        arrived = dispatch_handle.finish()
        y_TD = dispatch_handle.start_home(arrived.x_TD * arrived.weights_TK.sum(1, True)).finish()
        y_TD.sum().backward()
    rank_of, own = E // world.size, nodes[rank]
    needed = [{nodes[e // rank_of] for e in ids if e < E} - {own} for ids in ids_TK.tolist()]
    names = ("dispatch across nodes", "combine across nodes")
    sent = [
        sum(t.num_bytes for t in log.transfers if t.where.endswith(name + end))
        for name in names
        for end in ("", ", backward")
    ]
    return sum(map(len, needed)), sent


@pytest.mark.parametrize("nodes", SHAPES.values(), ids=SHAPES)
def test_a_token_crosses_to_a_node_once(four_ranks, nodes):
    """Out D elements, K weights and K ids per token and node, home D; of all ranks, because gradients go the mirror
    way."""
    found = four_ranks.run(bytes_across, nodes)
    copies = sum(number for number, _ in found)
    out, out_back, home, home_back = (sum(sent[i] for _, sent in found) for i in range(4))
    assert copies > 0
    assert out == out_back == copies * (D + 2 * 3) * 8
    assert home == home_back == copies * D * 8


def nodes_of_torchrun():
    """Ranks 0 to 2 were started on one node, rank 3 on another; and all where torchrun was not there."""
    before = World().nodes()
    rank = dist.get_rank()
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank if rank < 3 else 0)}):
        return before, World().nodes()


def test_nodes_are_those_of_torchrun(four_ranks):
    assert four_ranks.run(nodes_of_torchrun) == [((0, 0, 0, 0), (0, 0, 0, 3))] * 4


def flat_where_nodes_change_nothing():
    for nodes in ((0, 0), (0, 1)):
        layer = build(SpreadCase(), torch.float64)
        way = spread_experts(layer, world_of(False), all_to_all="hierarchical", nodes=nodes)
        assert type(way.exchange()) is Ragged
    with pytest.raises(ConfigError, match="all_to_all=hierarchical with exchanges: .*; leave one out"):
        layer = build(SpreadCase(), torch.float64)
        spread_experts(layer, world_of(False), all_to_all="hierarchical", exchanges=Ragged)


def test_flat_where_nodes_change_nothing(two_ranks):
    two_ranks.run(flat_where_nodes_change_nothing)
