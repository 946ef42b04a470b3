"""Pools of ranks, forked once per session."""

import pytest
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401  the forked ranks need not import it again

from expertmesh.testing.ranks import RankPool


def _pool(num_ranks):
    pool = RankPool(num_ranks)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks():
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks():
    yield from _pool(4)
