"""Groups of a world that is a part of another one."""

import torch
import torch.distributed as dist

from expertmesh.comm.collectives import all_reduce
from expertmesh.comm.world import World


def sum_of_a_pair():
    """Of ranks 0 and 2 in the world of 0, 2 and 3, after groups in which some ranks were alone."""
    everyone = World(timeout_s=20)
    everyone.group([[0, 1], [2], [3]], name="uneven")
    three = dist.new_group([0, 2, 3])
    if dist.get_rank() == 1:
        return None
    world = World(three, timeout_s=20)
    pair = world.group([[0, 1], [2]], name="a pair")
    return all_reduce(torch.tensor(dist.get_rank() + 1.0), pair, where="test").item()


def test_groups_of_a_part_after_uneven_ones(four_ranks):
    """torch names a group of some ranks by the number of groups that each of them is in."""
    assert four_ranks.run(sum_of_a_pair) == [4.0, None, 4.0, 4.0]
