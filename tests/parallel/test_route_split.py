"""Plans: every divisor gives cells that share tokens and cells that share weights, and together they hold
everything."""

import pytest

from expertmesh.comm.mesh import ExpertDegrees, divisors
from expertmesh.errors import ConfigError
from expertmesh.parallel.experts.route_split import make_split

STORAGES = [
    ExpertDegrees(e, f, order)
    for e, f in ((1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (4, 6), (8, 8))
    for order in ("slices_inner", "experts_inner")
]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_cells(storage):
    for degree in divisors(storage.num_ranks):
        split = make_split(storage, degree)
        assert split.route_e * split.route_f == degree
        assert split.gather_e * split.gather_f * degree == storage.num_ranks
        for cell in split.route_cells():
            assert len(cell) == degree
            blocks = {split.block(rank) for rank in cell}
            assert blocks == {(b, q) for b in range(split.route_e) for q in range(split.route_f)}
        for cell in split.gather_cells():
            assert len({split.block(rank) for rank in cell}) == 1
        for cells in (split.route_cells(), split.gather_cells()):
            assert sorted(rank for cell in cells for rank in cell) == list(range(storage.num_ranks))


def test_slices_are_joined_before_experts_are():
    split = make_split(ExpertDegrees(4, 2), 4)
    assert (split.route_e, split.route_f) == (4, 1)


def test_rank_order():
    inner = ExpertDegrees(2, 2, "slices_inner")
    outer = ExpertDegrees(2, 2, "experts_inner")
    assert [inner.coordinates(r) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [outer.coordinates(r) for r in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [outer.rank_of(*outer.coordinates(r)) for r in range(4)] == list(range(4))


@pytest.mark.parametrize("degree", [0, 3, 5, -1, 8])
def test_no_divisor(degree):
    with pytest.raises(ConfigError, match=rf"route_degree={degree}: must divide the 4 ranks.*nearest: [124]$"):
        make_split(ExpertDegrees(2, 2), degree)
