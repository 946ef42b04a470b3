"""Where experts lie: every rank has its slots, every expert a copy, and no rank much more to do than the others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.costs.eplb import Placement, hottest, in_order, num_copies, packed, placed


@st.composite
def cases(draw):
    """Loads, slots, ranks, nodes and groups that fit one another."""
    num_nodes = draw(st.sampled_from([1, 1, 2, 3]))
    ranks = draw(st.integers(1, 4))  # of a node
    groups = num_nodes * draw(st.integers(1, 2))
    of_group = draw(st.integers(1, 4))
    num_experts = groups * of_group
    own = num_experts // num_nodes
    least = -(-own // ranks)
    per_rank = draw(st.integers(least, min(least + 3, own)))
    loads = draw(
        st.lists(st.integers(0, 10**6), min_size=num_experts, max_size=num_experts)
        | st.just([1000 // (e + 1) for e in range(num_experts)])
    )
    sizes = {"num_slots": per_rank * ranks * num_nodes, "num_ranks": ranks * num_nodes}
    return loads, sizes | {"num_nodes": num_nodes, "num_groups": groups}


@settings(deadline=None)
@given(cases())
def test_all_slots_are_used_and_every_expert_is_there(case):
    loads, sizes = case
    found = placed(loads, **sizes)
    assert len(found.experts) == sizes["num_slots"] and found.num_experts == len(loads)
    assert set(found.experts) == set(range(len(loads)))
    assert sum(found.rank_loads(loads)) == pytest.approx(sum(loads))
    assert 0 < found.balance(loads) <= 1 + 1e-12
    assert found == placed(loads, **sizes)  # every rank computes it for itself
    for expert, slots in enumerate(found.slots_of):
        assert all(found.experts[slot] == expert for slot in slots)
    if sizes["num_nodes"] > 1:  # a group lies on one node
        size = len(loads) // sizes["num_groups"]
        of_node = sizes["num_slots"] // sizes["num_nodes"]
        for group in range(sizes["num_groups"]):
            own = (found.slots_of[e] for e in range(group * size, (group + 1) * size))
            assert len({slot // of_node for slots in own for slot in slots}) == 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_the_next_copy_goes_to_the_largest_load_per_copy(loads, data):
    most = data.draw(st.integers(1, 5))
    num_slots = data.draw(st.integers(len(loads), len(loads) * most))
    copies = num_copies(loads, num_slots=num_slots, most=most)
    assert sum(copies) == num_slots and min(copies) >= 1 and max(copies) <= most
    # with one copy less nobody else would have less to do for each of its copies
    for e, count in enumerate(copies):
        if count > 1:
            before = loads[e] / (count - 1)
            others = [x for x in range(len(loads)) if x != e and copies[x] < most]
            assert all(before >= loads[x] / copies[x] for x in others)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_packs_are_full_and_as_light_as_greedy_promises(num_packs, size, data):
    count = num_packs * size
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    packs = packed(weights, range(count), num_packs)
    assert sorted(item for pack in packs for item in pack) == list(range(count))
    assert all(len(pack) == size for pack in packs)
    totals = [sum(weights[item] for item in pack) for pack in packs]
    # packs that had room when the last item came were no lighter
    assert max(totals) <= sum(weights) / num_packs + size * max(weights)


@pytest.mark.parametrize(("num_experts", "num_ranks", "more"), [(64, 8, 8), (16, 4, 4), (8, 2, 2)])
def test_copies_flatten_a_zipf_load(num_experts, num_ranks, more):
    loads = [10_000 / (e + 1) for e in range(num_experts)]
    before = in_order(num_experts, num_ranks)
    packed_only = placed(loads, num_slots=num_experts, num_ranks=num_ranks)
    after = placed(loads, num_slots=num_experts + more, num_ranks=num_ranks)
    largest = [max(one.rank_loads(loads)) for one in (before, packed_only, after)]
    assert largest[0] > largest[1] > largest[2]
    assert after.balance(loads) > 0.93


def test_two_copies_of_an_expert_lie_on_two_ranks():
    found = placed([100, 1, 1, 1], num_slots=8, num_ranks=4)
    assert [found.of_rank(rank).count(0) for rank in range(4)] == [1, 1, 1, 1]


def test_no_load_and_equal_loads_are_placed_too():
    for loads in ([0] * 4, [7] * 4):
        found = placed(loads, num_slots=6, num_ranks=2)
        assert sorted(set(found.experts)) == [0, 1, 2, 3] and found.balance(loads) >= 0.9
    assert in_order(4, 2) == Placement((0, 1, 2, 3), 2)
    assert hottest([3, 9, 9, 1], 2) == (1, 2)
