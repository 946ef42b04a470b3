"""Skipped branches never make the host wait for a GPU."""

import torch
from tests.moe.test_waits import empty
from tests.support.waits import waits

from expertmesh_families.swin.drop_path import DropPath


def test_skipped_branches_never_wait():
    paths = DropPath((0.1, 0.2)).train()
    with waits() as watch:
        paths(empty(4, dtype=torch.int64))
    assert watch.found == []
