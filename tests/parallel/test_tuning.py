"""Three points of the tuner's benchmark at the smallest size: it ends with the way that the measured numbers say."""

from statistics import median

import pytest
import torch
from tests.support.ranks import world_of
from torch import nn

from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.costs.communication import USUAL_NETWORK
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import Routing
from expertmesh.parallel.apply import resting_bytes
from expertmesh.parallel.experts import adaptive
from expertmesh.parallel.experts.adaptive import adapt
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.tuner import TIE, TOO_SLOW, Effort

E, D, T, K = 8, 8, 16, 2
POINTS = {
    "even": (1.0, None, (0, 0, 1, 1)),
    "one full expert": (4.0, None, (0, 0, 1, 1)),
    "capacity factor 1, all on one node": (4.0, 1.0, (0, 0, 0, 0)),
}


def routing(fullest, generator):
    weights_E = torch.ones(E)
    weights_E[0] = fullest * (E - 1) / max(E - fullest, 1) if fullest > 1 else 1.0
    return Routing(torch.multinomial(weights_E.expand(T, -1), K, generator=generator))


def tuned(fullest, capacity_factor, nodes):
    """What was reported to the tuner, in order, what it settled on, and the ways of all calls."""
    world = world_of()
    layer = MoELayer(dim=D, hidden_dim=6, num_experts=E, top_k=K, aux_loss_weight=0.0, seed=0)
    dispatcher = spread_experts(layer, world, nodes=nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "EFFORT", Effort(num_starts=3, num_ways=3))
        adapt([layer], DispatchOptions(), USUAL_NETWORK, num_gathers=1)
        tuner, reported, ways = dispatcher.chooser.tuner, [], []
        report, choose = tuner.report, tuner.choose

        def noting(trial, seconds):
            if not tuner.settled:
                reported.append((trial, seconds))
            report(trial, seconds)

        def noting_ways(load, bucket):
            way, trial = choose(load, bucket)
            ways.append(way)
            return way, trial

        tuner.report, tuner.choose = noting, noting_ways
        generator = torch.Generator().manual_seed(world.position)
        choices = routing(fullest, generator)
        for step in range(36):
            given = {"overlap_degree": 2} if step % 6 == 0 else {}
            x = torch.randn(T, D, generator=generator).requires_grad_()
            y, _ = layer(x, routing=choices, capacity_factor=capacity_factor, **given)
            y.sum().backward()
    return reported, tuner.settled, ways


def test_ranks_share_the_memory_of_a_node_and_not_that_of_a_gpu():
    kinds = ("cpu", "cuda")
    assert [adaptive._sharing_memory(kind, (0, 0, 0, 1)) for kind in kinds] == [3, 1]


def settled_without_room():
    """What a tuner settles on where the model itself is going to take all memory."""
    layer = MoELayer(dim=D, hidden_dim=6, num_experts=E, top_k=K, seed=0)
    dispatcher = spread_experts(layer, world_of(), nodes=(0, 0))
    adapt([layer], DispatchOptions(), USUAL_NETWORK, num_gathers=1, resting_bytes=1e30)
    for _ in range(2):
        layer(torch.ones(T, D))
    return list(dispatcher.chooser.tuner.settled.values()) == [dispatcher.usual]


def test_no_way_is_tried_where_the_model_leaves_no_memory(two_ranks):
    assert two_ranks.run(settled_without_room) == [True] * 2


def test_what_a_model_is_still_to_take():
    """Gradients and moments of what is trained, and weights that are not there yet."""
    for device, times in (("cpu", 3), ("meta", 4)):
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False))
        model[1].requires_grad_(False)
        model = model.to(device)
        assert resting_bytes(model, num_parts=2) == 4 * (24 * times + 8 * (times - 3)) / 2


def test_a_way_that_leaves_the_all_to_all_open_keeps_the_rest():
    assert adaptive._plain(DispatchOptions(4, 2, "auto", 1)) == DispatchOptions(4, 2, "flat", 1)


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_the_tuner_takes_the_way_with_the_least_measured_time(four_ranks, point):
    found = four_ranks.run(tuned, *point)
    reported, settled, ways = found[0]
    assert len(ways) == 30, "a call that says how it goes is no trial"
    assert all(other == found[0] for other in found), "all ranks hear and decide the same"
    assert all(seconds > 0 for _, seconds in reported)
    times = {}
    for trial, seconds in reported:
        times.setdefault(trial.dispatch, []).append(seconds)
    counted = {way: seconds[1:] for way, seconds in times.items()}
    least = min(map(min, counted.values()))
    left = [way for way in counted if min(counted[way]) <= TOO_SLOW * least]
    (key, way), *others = settled.items()
    assert not others and len(counted) == 3
    fastest = min(median(counted[w]) for w in left)
    assert way == ways[-1] and median(counted[way]) <= TIE * fastest
    assert key.endswith("-C1") == (point[1] is not None)
