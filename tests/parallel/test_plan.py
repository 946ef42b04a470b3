"""Plans: every divisor gives cells that share tokens and cells that share weights, and together they hold everything."""

import pytest

from expertmesh.comm.mesh import ExpertDegrees, divisors
from expertmesh.errors import ConfigError
from expertmesh.parallel.experts.exchange_layout import make_plan

STORAGES = [
    ExpertDegrees(e, f, order)
    for e, f in ((1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (4, 6), (8, 8))
    for order in ("slices_inner", "experts_inner")
]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_cells(storage):
    for degree in divisors(storage.num_ranks):
        plan = make_plan(storage, degree)
        assert plan.route_e * plan.route_f == degree
        assert plan.gather_e * plan.gather_f * degree == storage.num_ranks
        for cell in plan.route_cells():
            assert len(cell) == degree
            blocks = {plan.block(rank) for rank in cell}
            assert blocks == {(b, q) for b in range(plan.route_e) for q in range(plan.route_f)}
        for cell in plan.gather_cells():
            assert len({plan.block(rank) for rank in cell}) == 1
        for cells in (plan.route_cells(), plan.gather_cells()):
            assert sorted(rank for cell in cells for rank in cell) == list(range(storage.num_ranks))


def test_slices_are_joined_before_experts_are():
    plan = make_plan(ExpertDegrees(4, 2), 4)
    assert (plan.route_e, plan.route_f) == (4, 1)


def test_rank_order():
    inner = ExpertDegrees(2, 2, "slices_inner")
    outer = ExpertDegrees(2, 2, "experts_inner")
    assert [inner.coordinates(r) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [outer.coordinates(r) for r in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [outer.rank_of(*outer.coordinates(r)) for r in range(4)] == list(range(4))


@pytest.mark.parametrize("degree", [0, 3, 5, -1, 8])
def test_no_divisor(degree):
    with pytest.raises(
        ConfigError, match=rf"route_degree={degree}: must divide the 4 ranks.*nearest: [124]$"
    ):
        make_plan(ExpertDegrees(2, 2), degree)
