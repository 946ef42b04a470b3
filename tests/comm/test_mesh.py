"""Factorisations of the ranks: every valid one is taken, every other one is refused with the nearest that is valid."""

import math

import pytest

from expertmesh.comm.mesh import dense_degrees, dense_mesh, divisors, expert_degrees, expert_mesh
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 12, 64])
def test_all_valid_dense_degrees(num_ranks):
    for replicate in divisors(num_ranks):
        for tp in divisors(num_ranks // replicate):
            found = dense_degrees(num_ranks, dp_replicate=replicate, tp=tp)
            assert found.num_ranks == num_ranks
            assert found.num_storage_ranks == num_ranks // replicate
            again = dense_degrees(num_ranks, dp_replicate=replicate, dp_shard=found.dp_shard, tp=tp)
            assert again == found


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "nearest"),
    [
        (8, {"dp_replicate": 3}, "dp_replicate_degree=4, dp_shard_degree=2, tp_degree=1"),
        (8, {"dp_shard": 4}, "dp_replicate_degree=2, dp_shard_degree=4, tp_degree=1"),
        (4, {"tp": 8}, "dp_replicate_degree=1, dp_shard_degree=1, tp_degree=4"),
        (
            2,
            {"dp_replicate": 2, "dp_shard": 2},
            "dp_replicate_degree=1, dp_shard_degree=2, tp_degree=1",
        ),
    ],
)
def test_wrong_dense_degrees(num_ranks, degrees, nearest):
    with pytest.raises(ConfigError) as caught:
        dense_degrees(num_ranks, **degrees)
    message = str(caught.value)
    assert nearest in message and f"does not make {num_ranks} ranks" in message
    for value in degrees.values():
        assert f"={value} " in message


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("num_experts", [1, 2, 4, 6, 16])
def test_fewest_slices(num_ranks, num_experts):
    found = expert_degrees(num_ranks, num_experts=num_experts, hidden_dim=240)
    assert found.f == num_ranks // math.gcd(num_experts, num_ranks)
    assert found.num_ranks == num_ranks and num_experts % found.e == 0


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "hidden_dim", "es_degree", "fix"),
    [
        (4, 8, 12, 3, "use es_degree=2|use es_degree=4"),
        (4, 8, 10, 4, "use es_degree=2"),
        (4, 2, 9, None, "use dp_replicate_degree=2, or a hidden_dim divisible by 2"),
        (4, 2, 12, 1, "use es_degree=2"),
        (4, 4, 12, 0, "use es_degree=1"),
    ],
)
def test_wrong_expert_degrees(num_ranks, num_experts, hidden_dim, es_degree, fix):
    with pytest.raises(ConfigError, match=f"num_experts={num_experts} and hidden_dim={hidden_dim}.*({fix})"):
        expert_degrees(num_ranks, num_experts=num_experts, hidden_dim=hidden_dim, es_degree=es_degree)


def both_meshes():
    world = World()
    try:
        dense = dense_mesh(world, dense_degrees(4, dp_replicate=2, dp_shard=1, tp=2))
        experts = expert_mesh(world, expert_degrees(4, num_experts=2, hidden_dim=8, order="experts_inner"))
        return dense.mesh.tolist(), experts.mesh.tolist(), experts.get_coordinate()
    finally:
        world.close()


def test_meshes(four_ranks):
    answers = four_ranks.run(both_meshes)
    assert [a[0] for a in answers] == [[[[0, 1]], [[2, 3]]]] * 4
    assert [a[1] for a in answers] == [[[0, 2], [1, 3]]] * 4  # no axis of one copy
    assert [tuple(a[2]) for a in answers] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "hidden_dim", "copies", "tp", "fix"),
    [
        (3, 4, 64, 1, 1, "use dp_replicate_degree=3, or a hidden_dim divisible by 3"),
        (3, 4, 64, 2, 1, "use dp_replicate_degree=6, or"),
        (6, 4, 64, 1, 2, "use dp_replicate_degree=3, or"),
        (12, 4, 64, 1, 1, "use dp_replicate_degree=3, or"),
        (
            3,
            4,
            64,
            1,
            3,
            "use tp_degree=1 with dp_replicate_degree=3, or a hidden_dim divisible by 3",
        ),
    ],
)
def test_the_fix_is_the_flag_that_changes_no_model(num_ranks, num_experts, hidden_dim, copies, tp, fix):
    with pytest.raises(ConfigError, match=fix):
        expert_degrees(
            num_ranks,
            num_experts=num_experts,
            hidden_dim=hidden_dim,
            num_replicas=copies,
            tp_degree=tp,
        )
