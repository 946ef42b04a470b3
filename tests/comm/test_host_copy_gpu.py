"""With a GPU: numbers for the host are right, and the host waits for nothing else."""

import pytest
import torch

from expertmesh.comm.all_to_all.flat import AsyncCounts
from expertmesh.comm.group import Pending, RankGroup, Traffic
from expertmesh.comm.host_copy import beside, on_host
from expertmesh.errors import CollectiveError

pytestmark = pytest.mark.gpu

LONG = 1_000_000_000
"""Clock ticks of a GPU: about half a second."""


class Pair(RankGroup):
    """Two ranks of which the other one sends zeros, at once."""

    def __init__(self):
        super().__init__(None, ranks=(0, 1), rank=0, name="a pair", timeout_s=1.0, traffic=Traffic())

    def start(self, *args, **kwargs):
        return Pending(None, CollectiveError)


def test_the_numbers_are_those_of_the_tensor():
    for x in (torch.tensor(3), torch.arange(6).view(2, 3), torch.tensor([0.5])):
        assert on_host(x.cuda())() == x.tolist()


def test_the_host_waits_for_no_work_behind_them():
    numbers = on_host(torch.arange(4, device="cuda"))
    torch.cuda._sleep(LONG)
    assert numbers() == [0, 1, 2, 3]
    assert not torch.cuda.current_stream().query()


def test_the_host_waits_for_no_work_beside_them():
    x = torch.arange(4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    with beside(x.device):
        numbers = on_host(x + 1)
    assert numbers() == [1, 2, 3, 4]
    assert not torch.cuda.current_stream().query()


def test_the_host_waits_for_the_counts_of_a_dispatch_alone():
    counts = torch.tensor([[1], [2]], device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    (column,) = AsyncCounts(counts, Pair(), where="a layer").finish()
    assert column.send == [1, 2]
    assert not torch.cuda.current_stream().query()
