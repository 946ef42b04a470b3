"""Ranks are bound to NUMA nodes where nobody else did it."""

import pytest

from expertmesh.comm.bind import numa_nodes, share_of

NODES = [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.mark.parametrize(
    ("local", "number", "allowed", "cores"),
    [
        (0, 4, range(8), {0, 1, 2, 3}),
        (1, 4, range(8), {0, 1, 2, 3}),
        (2, 4, range(8), {4, 5, 6, 7}),
        (2, 3, range(1, 6), {4, 5}),
        (0, 1, range(8), None),
        (3, 4, range(4, 8), None),
    ],
)
def test_neighbours_share_a_node_and_who_is_bound_stays(local, number, allowed, cores):
    assert share_of(local, number, NODES, set(allowed)) == cores


def test_a_rank_with_a_gpu_goes_near_it():
    """Four of a machine's eight GPUs are often on one node, where their ranks would be on two."""
    for local in range(4):
        assert share_of(local, 4, NODES, set(range(8)), near=NODES[0]) == NODES[0]
    assert share_of(3, 4, NODES, {0, 1, 4, 5}, near=NODES[0]) == {0, 1}
    assert share_of(3, 4, NODES, {0, 4, 5}, near={8, 9}) == {4, 5}
    assert share_of(3, 4, NODES, {4, 5}, near=NODES[0]) is None


def test_nodes_are_in_the_order_of_their_numbers_and_those_without_cores_left_out(tmp_path):
    for node, text in ((10, "6-7,9\n"), (2, "0-1\n"), (3, "\n")):
        folder = tmp_path / "devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    assert list(numa_nodes(tmp_path).items()) == [(2, (0, 1)), (10, (6, 7, 9))]
