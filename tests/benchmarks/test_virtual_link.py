"""A link that is reckoned: exchanges one after the other, hidden by what the rank computes meanwhile, nothing else."""

import pytest
from benchmarks.adaptive.virtual import Link

from expertmesh.comm.group import Pending, RankGroup, Traffic


class Done:
    def wait(self):
        return True


def started(group, collective, num_bytes):
    return group.start(collective, "a layer", num_bytes, lambda _: Done(), then=None)


@pytest.fixture
def group():
    return RankGroup(object(), ranks=(0, 1), rank=0, name="both", timeout_s=1.0, traffic=Traffic())


def test_exchanges_take_the_link_one_after_the_other(group):
    link = Link(100.0)
    began = link.now()
    with link.under():
        one, two = (started(group, "all_to_all", n) for n in (100, 300))
        one.wait()
        assert link.now() - began >= 1.0 and link.waited_s <= 1.0
        two.wait()
        two.wait()  # costs nothing again
    assert link.now() - began >= 4.0 and link.waited_s <= 4.0
    assert link.sent == 400


def test_what_is_computed_meanwhile_is_not_waited_for(group):
    link = Link(1e9)
    with link.under():
        pending = started(group, "all_to_all", 1)
        began = link.now()
        while link.now() - began < 1e-3:
            sum(range(1000))
        pending.wait()
    assert link.waited_s == 0


def test_other_collectives_cost_nothing_and_all_is_as_before_afterwards(group):
    start, wait, link = RankGroup.start, Pending.wait, Link(1.0)
    with link.under():
        started(group, "all_gather", 100).wait()
    assert link.waited_s == 0 == link.sent
    assert (RankGroup.start, Pending.wait) == (start, wait)
