"""The tuner finds the fastest way in bounded trials, never one that does not fit, and its files are read with care."""

import itertools
import logging

import pytest
import torch

from expertmesh.config.way import Way
from expertmesh.costs.communication import (
    Link,
    Network,
    RouteShape,
    TokenLoad,
    faster_all_to_all,
    flat_copies,
    hierarchical_copies,
    travel_seconds,
)
from expertmesh.costs.layer_time import LayerShape, Machine, extra_bytes, step_time
from expertmesh.parallel.experts.load import LoadRecord
from expertmesh.planner.cache import (
    Topology,
    load_network,
    load_plans,
    save_network,
    save_plans,
)
from expertmesh.planner.tuner import NUM_TRIALS, TOO_SLOW, Bucket, Choices, Tuner, finalists

SLOW = Network(Link(1e-5, 1e10), Link(1e-4, 2.5e7))
SHAPE = LayerShape(8, 64, 128, 3, 4, 4, num_ranks=4)
HOT = TokenLoad(512, 2, (0.65, *(0.05,) * 7))


def route(r, nodes=(0, 0, 1, 1)):
    return RouteShape(r, tuple(range(r)), r, nodes[:r], 4 // r, r < 4)


def choices(**changes):
    routes = {r: route(r) for r in (1, 2, 4)}
    usual = Way(4, 1, "flat", 0)
    values = {
        "routes": routes,
        "overlap_degrees": (1, 2),
        "kinds": ("flat", "hierarchical"),
        "shadows": (0, 1),
        "usual": usual,
        "budget_bytes": 1e12,
    }
    return Choices(**values | changes)


def test_copies_are_those_of_all_choices():
    """Even choices of K among E, each as likely: counted one by one."""
    E, K, T = 8, 3, 10
    load, four = TokenLoad.even(T, K, E), route(4)
    sets = list(itertools.combinations(range(E), K))
    ranks = sum(len({e // 2 for e in ids} - {0, 1}) for ids in sets) / len(sets)
    nodes = sum(len({e // 4 for e in ids} - {0}) for ids in sets) / len(sets)
    assert flat_copies(four, load).across == pytest.approx(2 * T * ranks)
    assert hierarchical_copies(four, load).across == pytest.approx(2 * T * nodes)
    inside = sum(len({e // 2 for e in ids} & {1}) for ids in sets) / len(sets)
    assert flat_copies(four, load).inside == pytest.approx(T * inside)


def test_the_all_to_all_with_fewer_bytes_across_a_slow_link_is_chosen():
    sizes = {"dim": 512, "element_bytes": 4}
    kinds = [
        faster_all_to_all(route(4), TokenLoad.even(4096, K, 32), SLOW, **sizes) for K in (1, 8)
    ]
    assert kinds == ["flat", "hierarchical"]
    # with two experts per token on four nodes there is little to save, and the second hop costs time of its own
    few, wide = TokenLoad.even(4096, 2, 32), route(8, nodes=(0, 0, 1, 1, 2, 2, 3, 3))
    assert faster_all_to_all(wide, few, SLOW, **sizes) == "flat"
    one_node = route(4, nodes=(0,) * 4)
    assert faster_all_to_all(one_node, TokenLoad.even(4096, 8, 32), SLOW, **sizes) == "flat"
    assert travel_seconds("flat", route(1), HOT, SLOW, **sizes) == 0


def test_parts_hide_travel_and_shadows_take_rows_from_the_fullest_rank():
    machine = Machine(SLOW, 1e10)
    one, two = (step_time(Way(4, n, "flat", 0), route(4), SHAPE, HOT, machine) for n in (1, 2))
    assert two.total_s < one.total_s == one.products_s + one.travel_s + one.weights_s
    shadowed = step_time(Way(4, 1, "flat", 1), route(4), SHAPE, HOT, machine)
    # of 0.65 + 0.05 on one rank of four, the hot expert's part is shared by all
    assert shadowed.products_s / one.products_s == pytest.approx((0.1 * 4 + 0.65) / (0.7 * 4))
    assert shadowed.weights_s > one.weights_s == 0


def rank(load, trains):
    return finalists(choices(), SHAPE, load, Machine(SLOW, 1e10), number=6)


def test_the_fastest_measured_way_is_settled_in_bounded_trials():
    ways = rank(HOT, True)
    assert Way(4, 1, "flat", 0) in ways and {w.route_degree for w in ways} == {1, 2, 4}
    truth = {way: 1.0 + i for i, way in enumerate(reversed(ways))}
    told = []
    tuners = [Tuner(rank, on_settled=told.append) for _ in range(2)]
    bucket, trials = Bucket.of(HOT, num_ranks=4, trains=True), 0
    while True:
        found = [tuner.choose(HOT, bucket) for tuner in tuners]
        assert found[0] == found[1]
        way, trial = found[0]
        if trial is None:
            break
        first = trials < len(ways)
        for tuner in tuners:
            tuner.report(trial, 100.0 if first else truth[way])
        trials += 1
    fast = sum(seconds <= TOO_SLOW * min(truth.values()) for seconds in truth.values())
    assert fast < len(ways), "some are slow, and measured once after the first"
    assert trials == fast * (NUM_TRIALS + 1) + (len(ways) - fast) * 2
    assert way == ways[-1] == told[0][bucket.key]
    other = TokenLoad.even(512, 2, 8)
    assert Bucket.of(other, num_ranks=4, trains=True) != bucket
    assert Tuner(rank, known=told[0]).choose(HOT, bucket) == (way, None)


def test_a_capacity_factor_is_part_of_a_bucket():
    """What it drops is no load."""
    found = [
        Bucket.of(HOT, num_ranks=4, trains=True, capacity_factor=factor).key
        for factor in (None, 1.0, 1.25)
    ]
    assert len(set(found)) == 3 and found[1].endswith("-C1")
    record = LoadRecord(4, num_ranks=2)
    record.note(torch.tensor([70, 10, 10, 10]))
    loads = [record.token_load(1, factor) for factor in (None, 2.0)]
    assert [load.shares[0] for load in loads] == [0.7, 0.5]
    assert [load.num_tokens for load in loads] == [50, 50]


def test_what_does_not_fit_is_never_tried():
    machine = Machine(SLOW, 1e10)
    bytes_of = {
        way: extra_bytes(way, route(way.route_degree), SHAPE, HOT) for way in rank(HOT, True)
    }
    budget = sorted(bytes_of.values())[1]
    fitting = finalists(choices(budget_bytes=budget), SHAPE, HOT, machine, number=99)
    assert fitting and all(
        extra_bytes(way, route(way.route_degree), SHAPE, HOT) <= budget for way in fitting
    )
    nothing = choices(budget_bytes=0)
    assert finalists(nothing, SHAPE, HOT, machine, number=6) == [nothing.usual]


BAD = [
    "",
    "{",
    '{"version": 0}',
    '{"version": 1}',
    '{"version": 1, "network": {"inside": 1}}',
    "[]",
]


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_ignored_with_one_line(tmp_path, caplog, text):
    path = tmp_path / "a" / "file.json"
    with caplog.at_level(logging.WARNING, "expertmesh"):
        assert load_plans(path, "model") == {} and load_network(path) is None
        assert not caplog.records
        path.parent.mkdir()
        path.write_text(text)
        assert load_plans(path, "model") == {}
        assert load_network(path) is None
    assert len(caplog.records) == 2
    assert all(
        "is ignored" in r.getMessage() and "\n" not in r.getMessage() for r in caplog.records
    )


def test_files_keep_what_was_found(tmp_path, caplog):
    plans = {"train-K2-T18-F5": Way(2, 4, "hierarchical", 1)}
    save_plans(tmp_path / "plans", plans, "model")
    save_network(tmp_path / "comm", SLOW, [])
    assert load_plans(tmp_path / "plans", "model") == plans
    assert load_network(tmp_path / "comm") == SLOW
    assert load_plans(tmp_path / "plans", "another") == {} and len(caplog.records) == 1
    assert Topology.of("cpu", (0, 0, 7)).name == "cpu-2+1"
