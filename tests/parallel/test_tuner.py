"""The tuner finds the fastest way in bounded trials, never one that does not fit, and its files are read with care."""

import itertools
import logging
from dataclasses import replace

import pytest
import torch

from expertmesh.config.dispatch_options import DispatchOptions
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
from expertmesh.costs.layer_time import ROWS_OF_A_PART, LayerShape, Machine, extra_bytes, step_time
from expertmesh.parallel.experts.load_record import LoadRecord
from expertmesh.parallel.experts.tuner import (
    CLOSE,
    TOO_SLOW,
    Bucket,
    Choices,
    Effort,
    ModelSearch,
    Tuner,
)
from expertmesh.parallel.experts.tuning_cache import (
    Topology,
    load_network,
    load_plans,
    plan_keeper,
    save_network,
    save_plans,
)

SLOW = Network(Link(1e-5, 1e10), Link(1e-4, 2.5e7))
SHAPE = LayerShape(8, 64, 128, 3, 4, 4, num_ranks=4)
HOT = TokenLoad(512, 2, (0.65, *(0.05,) * 7))


def route(r, nodes=(0, 0, 1, 1)):
    return RouteShape(r, tuple(range(r)), r, nodes[:r], 4 // r, r < 4)


def choices(**changes):
    routes = {r: route(r) for r in (1, 2, 4)}
    usual = DispatchOptions(4, 1, "flat", 0)
    values = {
        "routes": routes,
        "overlap_degrees": (1, 2),
        "kinds": ("flat", "hierarchical"),
        "replicated": (0, 1),
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
    kinds = [faster_all_to_all(route(4), TokenLoad.even(4096, K, 32), SLOW, **sizes) for K in (1, 8)]
    assert kinds == ["flat", "hierarchical"]
    # with two experts per token on four nodes there is little to save, and the second hop costs time of its own
    few, wide = TokenLoad.even(4096, 2, 32), route(8, nodes=(0, 0, 1, 1, 2, 2, 3, 3))
    assert faster_all_to_all(wide, few, SLOW, **sizes) == "flat"
    one_node = route(4, nodes=(0,) * 4)
    assert faster_all_to_all(one_node, TokenLoad.even(4096, 8, 32), SLOW, **sizes) == "flat"
    assert travel_seconds("flat", route(1), HOT, SLOW, **sizes) == 0


def test_parts_hide_travel_and_replicated_experts_take_rows_from_the_fullest_rank():
    machine = Machine(SLOW, 1e10)
    one, two = (step_time(DispatchOptions(4, n, "flat", 0), route(4), SHAPE, HOT, machine) for n in (1, 2))
    assert two.total_s < one.total_s == one.products_s + one.travel_s + one.weights_s
    replicated = step_time(DispatchOptions(4, 1, "flat", 1), route(4), SHAPE, HOT, machine)
    # of 0.65 + 0.05 on one rank of four, the hot expert's part is shared by all
    rows, of_part = HOT.num_tokens * HOT.top_k, 2 * ROWS_OF_A_PART
    ratio = ((0.1 * 4 + 0.65) * rows + of_part) / (0.7 * 4 * rows + of_part)
    assert replicated.products_s / one.products_s == pytest.approx(ratio)
    assert replicated.weights_s > one.weights_s == 0
    kept, every = (
        step_time(DispatchOptions(1, 1, "flat", 0), route(1), SHAPE, load, machine).products_s
        for load in (TokenLoad(512, 2, (1 / 16,) * 8), TokenLoad.even(512, 2, 8))
    )
    of_part = SHAPE.num_experts * ROWS_OF_A_PART
    assert kept / every == pytest.approx((rows / 2 + of_part) / (rows + of_part)), "half is dropped"


def search(**changes):
    return ModelSearch(choices(**changes), SHAPE, Machine(SLOW, 1e10))


def play(truth, effort, *, first=100.0):
    """Two tuners that hear the same; the way they settle on, what they tell, and the times of each way in order.

    A way's first time is `first`; its others are its true ones, or the true one.
    """
    told, times = [], {}
    tuners = [Tuner(search(), on_settled=told.append, effort=effort) for _ in range(2)]
    bucket = Bucket.of(HOT, num_ranks=4, trains=True)
    while True:
        found = [tuner.choose(HOT, bucket) for tuner in tuners]
        assert found[0] == found[1]
        way, trial = found[0]
        if trial is None:
            return way, told[0], times
        seen = times.setdefault(way, [])
        seconds = truth(way) if isinstance(truth(way), float) else truth(way)[len(seen) - 1]
        seen.append(seconds if seen else first)
        for tuner in tuners:
            tuner.report(trial, seen[-1])


def test_the_starts_are_of_all_sorts():
    ways = search().starts(HOT, True, 6)
    assert DispatchOptions(4, 1, "flat", 0) in ways and {w.route_degree for w in ways} == {1, 2, 4}
    wide = search(overlap_degrees=(1, 2, 4, 8), replicated=(0,)).starts(TokenLoad.even(512, 2, 8), True, 6)
    assert {w.all_to_all for w in wide if w.route_degree == 4} == {"flat", "hierarchical"}


def test_the_fastest_start_is_settled_in_bounded_trials():
    effort = Effort(num_ways=6)
    ways = search().starts(HOT, True, effort.num_starts)
    order = {way: 1.0 + i for i, way in enumerate(reversed(ways))}
    way, told, times = play(order.__getitem__, effort)
    least = min(order.values())
    for each, seen in times.items():
        slow, close = order[each] > TOO_SLOW * least, order[each] <= CLOSE * least
        assert len(seen) == (2 if slow else 1 + effort.num_trials), "only the fastest is close"
        assert not close or each == way
    bucket = Bucket.of(HOT, num_ranks=4, trains=True)
    assert way == ways[-1] == told[bucket.key] and set(times) == set(ways)
    other = TokenLoad.even(512, 2, 8)
    assert Bucket.of(other, num_ranks=4, trains=True) != bucket
    assert Tuner(search(), known=told).choose(HOT, bucket) == (way, None)


@pytest.mark.parametrize("best", [DispatchOptions(4, 1, "hierarchical", 0), DispatchOptions(4, 2, "flat", 0)])
def test_what_the_model_does_not_name_is_found_from_its_neighbours(best):
    """Times rise with the number of choices that differ, and the search begins with ways of another kind."""

    def truth(way):
        parts = abs((way.overlap_degree or 1) - best.overlap_degree)
        more = abs((way.replicated_experts or 0) - best.replicated_experts)
        far = parts + more + (way.all_to_all != best.all_to_all)
        return 1.0 + 0.2 * far + (way.route_degree != 4)

    effort = Effort(num_starts=4)
    assert best not in search().starts(HOT, True, 4)
    way, _, times = play(truth, effort)
    assert way == best and len(times) <= effort.num_ways
    assert all(len(seen) <= 1 + 2 * effort.num_trials for seen in times.values())


def test_close_ways_are_measured_again():
    """After three trials each the second looks faster; after six it does not."""
    effort = Effort(num_starts=4, num_ways=4)
    first, second, *others = search().starts(HOT, True, 4)
    truth = {
        first: [1.06, 1.06, 1.06, 1.0, 1.0, 1.0],
        second: [1.03, 1.03, 1.03, 1.1, 1.1, 1.1],
    } | dict.fromkeys(others, 9.0)
    way, _, times = play(truth.__getitem__, effort)
    assert way == first and [len(times[w]) for w in (first, second)] == [7, 7]


def test_of_equal_ways_the_simplest_is_settled_on():
    effort = Effort(num_starts=4, num_ways=4)
    ways, simplest = search().starts(HOT, True, 4), DispatchOptions(4, 1, "flat", 0)
    truth = {way: 1.0 if way.route_degree == 4 else 2.0 for way in ways} | {simplest: 1.02}
    assert len({way for way in ways if way.route_degree == 4}) > 1
    assert play(truth.__getitem__, effort)[0] == simplest
    assert play((truth | {simplest: 1.05}).__getitem__, effort)[0] != simplest


def test_a_capacity_factor_is_part_of_a_bucket():
    """What it drops is no load."""
    found = [Bucket.of(HOT, num_ranks=4, trains=True, capacity_factor=factor).key for factor in (None, 1.0, 1.25)]
    assert len(set(found)) == 3 and found[1].endswith("-C1")
    record = LoadRecord(4, num_ranks=2)
    record.note(torch.tensor([70, 10, 10, 10]))
    loads = [record.token_load(1, factor) for factor in (None, 2.0)]
    assert [load.shares[0] for load in loads] == [0.7, 0.5]
    assert [load.num_tokens for load in loads] == [50, 50]


def test_what_does_not_fit_is_never_tried():
    def needed(way):
        return extra_bytes(way, route(way.route_degree), SHAPE, HOT)

    budget = sorted(map(needed, search().starts(HOT, True, 6)))[1]
    small = search(budget_bytes=budget)
    fitting = small.starts(HOT, True, 99)
    assert fitting and all(needed(way) <= budget for way in fitting)
    assert all(needed(other) <= budget for way in fitting for other in small.near(way, HOT, True))
    nothing = search(budget_bytes=0)
    assert nothing.starts(HOT, True, 6) == [nothing.choices.usual]


def test_layers_that_keep_their_weights_need_them_all():
    """A model of twelve layers whose backward gathers again needs one layer's weights; else those of twelve."""

    def needed(way, num_layers, num_gathers):
        shape = replace(SHAPE, num_layers=num_layers, num_gathers=num_gathers)
        return extra_bytes(way, route(way.route_degree), shape, HOT)

    tokens, weights = DispatchOptions(4, 1, "flat", 0), DispatchOptions(1, 1, "flat", 0)
    gathered = SHAPE.num_experts * SHAPE.expert_elements * SHAPE.element_bytes
    again, kept = (needed(weights, 12, n) - needed(weights, 1, n) for n in (2, 1))
    assert kept - again == pytest.approx(11 * gathered)
    assert needed(tokens, 12, 1) == pytest.approx(12 * needed(tokens, 1, 1))


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
    assert all("is ignored" in r.getMessage() and "\n" not in r.getMessage() for r in caplog.records)


def test_files_keep_what_was_found(tmp_path, caplog):
    plans = {"train-K2-T18-F5": DispatchOptions(2, 4, "hierarchical", 1)}
    save_plans(tmp_path / "plans", plans, "model")
    save_network(tmp_path / "comm", SLOW, [])
    assert load_plans(tmp_path / "plans", "model") == plans
    assert load_network(tmp_path / "comm") == SLOW
    assert load_plans(tmp_path / "plans", "another") == {} and len(caplog.records) == 1
    assert Topology.of("cpu", (0, 0, 7)).name == "cpu-2+1"


def test_parts_that_are_given_leave_ways_whose_tokens_stay():
    """Of these there is one only, in one part."""
    given = search(overlap_degrees=(2,), usual=DispatchOptions(4, 2, "flat", 0))
    ways = given.starts(HOT, True, 99)
    assert DispatchOptions(1, 1, "flat", 0) in ways and given.near(DispatchOptions(1, 1, "flat", 0), HOT, True) == []
    assert all(other.overlap_degree == 2 for other in given.near(DispatchOptions(4, 2, "flat", 0), HOT, True))
    tuner, bucket = Tuner(given), Bucket.of(HOT, num_ranks=4, trains=True)
    while (found := tuner.choose(HOT, bucket))[1] is not None:
        tuner.report(found[1], 1.0)
    assert tuner.settled == {bucket.key: found[0]}


def test_trials_whose_times_do_not_come_are_made_again():
    """Forwards without a backward: the first 20,000 calls, and then every second one."""
    tuner, bucket = Tuner(search()), Bucket.of(HOT, num_ranks=4, trains=True)
    begun = []
    for call in range(50_000):
        way, trial = tuner.choose(HOT, bucket)
        begun.append(trial is not None)
        if tuner.settled:
            break
        if trial is not None and call > 20_000 and call % 2:
            tuner.report(trial, 1.0 + (trial.dispatch.replicated_experts or 0))
    assert sum(begun[:20_000]) < 10 * sum(begun[:50]), "ever more seldom"
    assert call > 20_000 and tuner.settled[bucket.key].replicated_experts == 0


def test_plans_of_another_time_are_checked():
    way, bucket = DispatchOptions(4, 2, "flat", 1), Bucket.of(HOT, num_ranks=4, trains=True)
    for changes, fits in (({}, True), ({"budget_bytes": 0}, False)):
        tuner = Tuner(search(**changes), known={bucket.key: way})
        assert (tuner.choose(HOT, bucket) == (way, None)) is fits
    for changes in ({"overlap_degrees": (1,)}, {"kinds": ("hierarchical",)}, {"replicated": (0,)}):
        assert choices().allow(way) and not choices(**changes).allow(way)
    assert choices(overlap_degrees=(4,)).allow(DispatchOptions(1, 1, "flat", 0))
    assert not choices().allow(DispatchOptions(8, 1, "flat", 0)) and not choices().allow(
        DispatchOptions(1, 2, "flat", 0)
    )


def test_plans_that_cannot_be_kept_stop_nothing(tmp_path, caplog):
    (tmp_path / "plans").write_text("a file")
    keep = plan_keeper(tmp_path / "plans" / "cpu.json", "model")
    for _ in range(2):
        keep({"train-K2-T18-F5": DispatchOptions(2, 4, "flat", 1)})
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/plans/cpu.json: the plans that were found are not kept: File exists"
    ]
    taken = tmp_path / "taken" / "cpu.json"
    taken.mkdir(parents=True)
    plan_keeper(taken, "model")({"a": DispatchOptions(1, 1, "flat", 0)})
    assert list(taken.parent.iterdir()) == [taken], "no part of a file is left"
    plan_keeper(tmp_path / "kept", "model")({"a": DispatchOptions(1, 1, "flat", 0)})
    assert load_plans(tmp_path / "kept", "model") == {"a": DispatchOptions(1, 1, "flat", 0)}
    save_plans(tmp_path / "kept", {"a": DispatchOptions(1, 0, "flat", 0)}, "model")
    assert load_plans(tmp_path / "kept", "model") == {}
