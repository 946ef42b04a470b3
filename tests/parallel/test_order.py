"""All ranks start the same collectives in the same order, whatever their tokens are: with NCCL another order is a
deadlock."""

import pytest
import torch
from tests.support.ranks import world_of
from torch.utils.checkpoint import checkpoint

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import USUAL_NETWORK
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import Routing
from expertmesh.parallel.experts.adaptive import adapt
from expertmesh.parallel.experts.dispatcher import spread_experts

D, E, K = 6, 8, 2
TOKENS = ((0, 5, 1, 9), (7, 0, 0, 0), (0, 0, 0, 0), (3, 3, 3, 3))
"""Of each rank, in one step after the other."""
UNEVEN = {"nodes": (0, 0, 0, 1)}
TWO_BY_TWO = {"nodes": (0, 0, 1, 1)}
CASES = {
    "parts": ({}, {"overlap_degree": 4}),
    "between nodes first": ({**TWO_BY_TWO, "all_to_all": "hierarchical"}, {"overlap_degree": 2}),
    "uneven nodes": ({**UNEVEN, "all_to_all": "hierarchical", "replicated_experts": 1}, {}),
    "auto": ({**UNEVEN, "all_to_all": "auto"}, {}),
    "hot experts": ({"replicated_experts": 2, "es_degree": 2}, {}),
    "gathered again": ({"route_degree": 2, "keep": "regather"}, {"overlap_degree": 2}),
    "copies": ({"num_replicas": 2, "route_degree": 1}, {}),
    "8 bits": ({"dispatch_dtype": "int8"}, {}),
    "drops": ({}, {"capacity_factor": 0.5}),
    "tuned": (TWO_BY_TWO, {}),
}


def collectives(case, repeats):
    """What this rank starts in some steps, each of its own experts and numbers of tokens, with evaluations between."""
    spread, options = CASES[case]
    world = world_of()
    layer = MoELayer(dim=D, hidden_dim=4, num_experts=E, top_k=K, seed=0, z_loss_weight=0.1)
    spread_experts(layer, world, **spread)
    if case == "tuned":
        adapt([layer], DispatchOptions(), USUAL_NETWORK, num_gathers=1)
    generator = torch.Generator().manual_seed(world.position)
    with world.traffic.logged() as log:
        for tokens in TOKENS * (3 if case == "tuned" else 1):  # until the tuner has settled
            T = tokens[world.position]
            x = torch.randn(T, D, generator=generator).requires_grad_()
            first_T = torch.randint(0, 2 if world.position % 2 else E, (T,), generator=generator)
            routing = Routing(torch.stack((first_T, (first_T + 1) % E), 1))

            def called(x, routing=routing):
                return layer(x, routing=routing, **options)

            y, stats = checkpoint(called, x, use_reentrant=False) if repeats else called(x)
            (y.sum() + stats.aux_loss + stats.z_loss).backward()
            with torch.no_grad():
                called(x)
    return [(t.collective, t.where) for t in log.transfers]


@pytest.mark.parametrize("repeats", [False, True], ids=["once", "again"])
def test_the_order_is_the_same_on_all_ranks(four_ranks, repeats):
    for case in CASES:
        found = four_ranks.run(collectives, case, repeats)
        if CASES[case][0].get("nodes") == UNEVEN["nodes"]:  # a rank alone on its node sends nothing inside
            found = [[each for each in order if "inside" not in each[1]] for order in found]
        assert len(found[0]) > len(TOKENS)
        assert all(order == found[0] for order in found), case
