"""Collectives: values, gradients, counted bytes, any group, and failures that say who and what."""

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import RankError, RankPool, world_of

from expertmesh.comm.all_to_all.flat import AsyncCounts, async_all_to_all
from expertmesh.comm.collectives import (
    FEW_BYTES,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
)
from expertmesh.comm.group import wait
from expertmesh.comm.world import World
from expertmesh.errors import CollectiveError, ConfigError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def group_of(cells):
    return world_of().group(cells, name="a test's ranks")


def values_and_gradients(cells):
    """Each collective and its gradient, with small integers, which all dtypes add exactly."""
    group = group_of(cells)
    mine = world_of().position
    for dtype in DTYPES:
        x = torch.full((2, 3), mine + 1.0, dtype=dtype, requires_grad=True)
        y = all_gather(x, group, where="test")
        assert [part[0, 0].item() for part in y] == [rank + 1 for rank in group.ranks]
        (y * (1 + torch.arange(group.size)).view(-1, 1, 1)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, group.size * (group.rank + 1)))

        x = torch.full((group.size, 2), mine + 1.0, dtype=dtype, requires_grad=True)
        y = reduce_scatter(x, group, where="test")
        total = sum(rank + 1 for rank in group.ranks)
        assert torch.equal(y, torch.full_like(y, total))
        (y.sum() * (group.rank + 1)).backward()
        assert x.grad[:, 0].tolist() == [place + 1 for place in range(group.size)]

        x = torch.full((2,), mine + 1.0, dtype=dtype, requires_grad=True)
        y = all_reduce(x, group, where="test")
        assert torch.equal(y, torch.full_like(y, total)) and x[0].item() == mine + 1
        (y.sum() * (group.rank + 1)).backward()
        assert x.grad[0].item() == sum(range(1, group.size + 1))


@pytest.mark.parametrize("cells", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]], ids=str)
def test_values_and_gradients(four_ranks, cells):
    four_ranks.run(values_and_gradients, cells)


def ragged(cells, rows_of):
    """Rank p sends rows_of[p][q] rows to rank q; each row says where it is from and for whom."""
    group = group_of(cells)
    send = rows_of[group.rank][: group.size]
    counts_PC = torch.tensor([[n, 10 * n] for n in send])
    counts, tens = AsyncCounts(counts_PC, group, where="test").finish()
    receive = [rows_of[place][group.rank] for place in range(group.size)]
    assert (counts.send, counts.receive) == (send, receive)
    assert tens.receive == [10 * n for n in receive]
    for dtype in DTYPES:
        rows = [[group.rank, place] for place, n in enumerate(send) for _ in range(n)]
        x = torch.tensor(rows, dtype=dtype).view(-1, 2).requires_grad_()
        with world_of().traffic.logged() as log:
            y = async_all_to_all(x, counts, group, where="test").finish()
            (y * (group.rank + 1)).sum().backward()
        expected = [[place, group.rank] for place, n in enumerate(receive) for _ in range(n)]
        assert y.tolist() == expected
        assert x.grad[:, 0].tolist() == [row[1] + 1 for row in rows]
        there = sum(n for place, n in enumerate(send) if place != group.rank)
        back = sum(n for place, n in enumerate(receive) if place != group.rank)
        assert log.num_bytes() == (there + back) * 2 * x.element_size()
        home = async_all_to_all(y, counts.mirrored(), group, where="test").finish()
        assert torch.equal(home, x)


ROWS = [[1, 0, 3, 2], [0, 0, 0, 0], [5, 1, 0, 0], [2, 2, 2, 2]]


@pytest.mark.parametrize("cells", [[[0, 1, 2, 3]], [[0, 3], [1, 2]]], ids=str)
def test_ragged_all_to_all(four_ranks, cells):
    four_ranks.run(ragged, cells, ROWS)


def logs_nest():
    group = group_of([[0, 1]])
    x = torch.ones(4)
    with world_of().traffic.logged() as outer:
        all_reduce(x, group, where="layer 1, statistics")
        with world_of().traffic.logged() as inner:
            all_gather(x, group, where="layer 2, weights")
    all_gather(x, group, where="nobody listens")
    return outer.num_bytes(), inner.num_bytes(), outer.num_bytes(collective="all_reduce")


def test_logs(two_ranks):
    """All-gather hands 16 bytes to the other rank; all-reduce twice half of 16."""
    assert two_ranks.run(logs_nest) == [(32, 16, 16)] * 2


def sums_of_any_size(num_elements):
    """The same total to the bit on all ranks, in place, whichever way the parts take."""
    group = group_of([[0, 1, 2, 3]])
    totals = []
    for dtype in (*DTYPES, torch.int64, torch.int32):
        x = torch.arange(num_elements).remainder(7).add(group.rank).to(dtype)
        with world_of().traffic.logged() as log:
            wait(start_all_reduce(x, group, where="test"))
        expected = 4 * torch.arange(num_elements).remainder(7) + 6
        assert torch.equal(x, expected.to(dtype)), dtype
        totals.append(log.num_bytes() / x.nbytes)
    return totals


@pytest.mark.parametrize(("num_elements", "handed_out"), [(3, 3.0), (FEW_BYTES, 1.5)], ids=str)
def test_sums_of_any_size(four_ranks, num_elements, handed_out):
    """A small tensor goes whole to the three others; of a large one each rank hands out 2 x 3 / 4."""
    assert four_ranks.run(sums_of_any_size, num_elements) == [[handed_out] * 6] * 4


def absent():
    world = World(timeout_s=15.0)
    group = world.group([[0, 1], [2, 3]], name="the ranks that share tokens")
    if world.position == 1:
        return None
    try:
        all_gather(torch.ones(2), group, where="layer 7, weights")
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_missing_rank_is_named_in_time():
    pool = RankPool(4)
    try:
        answers = pool.run(absent)
    finally:
        pool.stop()
    assert answers[0].startswith(
        "rank 0: all_gather of layer 7, weights over the ranks that share tokens (ranks 0, 1) failed or took over 15 "
        "s: "
    )
    assert answers[1:] == [None, "no error", "no error"]


def test_no_process_group():
    with pytest.raises(ConfigError, match="call torch.distributed.init_process_group first"):
        World()


def fails_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("this rank fails")
    return rank


def test_the_pool_reports_failures_and_recovers():
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match="rank 1 of 2(.|\n)*this rank fails"):
            pool.run(fails_on, 1)
        assert pool.run(fails_on, 5) == [5, 5]
    finally:
        pool.stop()
