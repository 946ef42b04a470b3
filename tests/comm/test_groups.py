"""Worlds: which tensors they are for, which nodes their ranks are on, and groups of one that is a part of another."""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from tests.support.patience import PATIENCE_S

from expertmesh.comm.collectives import all_reduce
from expertmesh.comm.world import World, check_backend, device_type_of, nodes_of
from expertmesh.errors import ConfigError
from expertmesh.parallel.apply import check_current, model_device_type
from expertmesh.parallel.ranks import Ranks, backend_for, end_groups, open_ranks


def sum_of_a_pair():
    """Of ranks 0 and 2 in the world of 0, 2 and 3, after groups in which some ranks were alone."""
    everyone = World(timeout_s=PATIENCE_S)
    everyone.group([[0, 1], [2], [3]], name="uneven")
    three = dist.new_group([0, 2, 3])
    if dist.get_rank() == 1:
        return None
    world = World(three, timeout_s=PATIENCE_S)
    pair = world.group([[0, 1], [2]], name="a pair")
    return all_reduce(torch.tensor(dist.get_rank() + 1.0), pair, where="test").item()


def test_groups_of_a_part_after_uneven_ones(four_ranks):
    """torch names a group of some ranks by the number of groups that each of them is in."""
    assert four_ranks.run(sum_of_a_pair) == [4.0, None, 4.0, 4.0]


def alone_among_others():
    """What a world of one rank tells itself, while the others do something else."""
    groups = [dist.new_group([rank]) for rank in range(4)]
    rank = dist.get_rank()
    return rank if rank == 1 else Ranks(World(groups[rank])).on_rank0(lambda: rank)


def test_a_world_of_one_rank_asks_nobody_else(four_ranks):
    assert four_ranks.run(alone_among_others) == [0, 1, 2, 3]


def failed_on_gpus():
    """What a pair sums up after an error has ended a run on GPUs."""
    with suppress(ValueError), open_ranks(device_type="cuda", timeout_s=PATIENCE_S) as found:
        pair = found.world.group([[0, 1], [2, 3]], name="a pair")
        raise ValueError
    total = all_reduce(torch.ones(1), pair, where="test").item()
    found.world.close()
    return total


def test_a_rank_that_fails_does_not_wait_for_the_others(four_ranks):
    """Groups of NCCL end by agreement only, so those that a run of another group has made stay."""
    assert four_ranks.run(failed_on_gpus) == [2.0] * 4


def test_all_groups_end_without_the_others():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World()
    world.mesh((1, 1), ("a", "b"), [0])
    assert world.all_ranks().name == "all ranks", "what errors say, also when a mesh was first"
    end_groups(world, ours=True, agree=False)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("backends", "has_gpu", "device_type"),
    [
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo", False, "cpu"),
    ],
)
def test_a_world_is_for_the_tensors_of_its_group(backends, has_gpu, device_type):
    assert device_type_of(backends, has_gpu=has_gpu) == device_type


def test_tensors_that_a_group_cannot_move_are_refused():
    check_backend("cpu", "cpu:gloo,cuda:nccl")
    check_backend("cuda", "cuda:nccl")
    with pytest.raises(ConfigError, match=r'tensors on cpu: .* cuda only; call .*"cpu:gloo,cuda:nccl"'):
        check_backend("cpu", "cuda:nccl")


def test_a_group_has_backends_for_what_travels():
    assert backend_for("cpu", on_host=True) == backend_for("cpu", on_host=False) == "gloo"
    assert backend_for("cuda", on_host=False) == "nccl"
    check_backend("cpu", backend_for("cuda", on_host=True))
    check_backend("cuda", backend_for("cuda", on_host=True))


def test_a_model_is_on_the_current_gpu():
    for device in ("cuda", "cuda:1"):
        check_current(torch.device(device), 1)
    with pytest.raises(ConfigError, match=r"on cuda:1 .* cuda:0; call torch.cuda.set_device\(1\)"):
        check_current(torch.device("cuda:1"), 0)
    assert model_device_type(torch.nn.Linear(1, 1)) == "cpu"
    assert model_device_type(torch.nn.Linear(1, 1, device="meta")) is None


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        # torchrun's agents, two of which are on one host
        ([("0", "a", "0"), ("1", "a", "1"), ("1", "a", "1"), ("2", "b", "3")], (0, 1, 1, 3)),
        # ranks that another launcher dealt out to hosts in turn
        ([("", "a", "0"), ("", "b", "1"), ("", "a", "1"), ("", "b", "2")], (0, 1, 0, 1)),
        # several nodes that are one host
        ([("", "a", "0"), ("", "a", "0"), ("", "a", "2"), ("", "a", "2")], (0, 0, 2, 2)),
    ],
)
def test_nodes_by_what_tells_them_apart(names, nodes):
    assert nodes_of(names, range(4)) == nodes
