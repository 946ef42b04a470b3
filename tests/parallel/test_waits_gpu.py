"""With a GPU: what brings gathered weights into order, and their gradients back, does not wait for it."""

from collections.abc import Iterator

import pytest
import torch

from expertmesh.comm.group import RankGroup, Traffic
from expertmesh.parallel.experts.gather import Layout

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_waits() -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_slices_whose_parts_are_no_neighbours(no_waits):
    ranks = RankGroup(None, ranks=(0, 1, 2, 3), rank=0, name="four", timeout_s=1.0, traffic=Traffic())
    layout = Layout(ranks, ((0, 2), (1, 3)), 0, 2)
    shards = torch.rand(4, 2, 3, 5, device="cuda")
    slices = layout.slices("w_in", shards)
    back = layout.by_rank("w_in", slices, shards[0])
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(back, shards)
