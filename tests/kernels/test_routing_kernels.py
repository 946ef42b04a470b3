"""Routing kernels under Triton's interpreter against the torch operators and oracles, outputs poisoned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.experts_case import draw_ids
from tests.support.poison import poisoned_empty

from expertmesh.kernels import route_metadata as kernels
from expertmesh.ops import reference

TOKENS = [0, 1, 7, 128, 1000]


def ids_of(kind, num_tokens, top_k, num_experts):
    """Expert ids (T, K) of a kind of traffic, in "uniform" and "dead" with E, which is "no expert"."""
    if num_tokens == 0 or kind == "dead":
        return torch.full((num_tokens, top_k), num_experts)
    return draw_ids("dropped" if kind == "uniform" else kind, num_tokens, top_k, num_experts)


def assert_metadata(ids_TK, num_experts, *, max_rows=None, **options):
    num_slots = ids_TK.numel()
    num_rows = num_slots if max_rows is None else min(num_slots, max_rows)
    with poisoned_empty():
        ours = kernels.route_metadata(ids_TK, num_experts, num_rows, **options)
    oracle = reference.route_metadata(ids_TK, num_experts, max_rows)
    names = ("offsets", "token_of_row", "slot_of_row", "row_of_slot")
    for name, a, b in zip(names, ours, oracle, strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a, b), name
    return ours


@pytest.mark.parametrize(
    ("num_experts", "top_k", "kind"),
    [
        (1, 1, "uniform"),
        (7, 2, "hot"),
        (7, 2, "dead"),
        (8, 8, "zipf"),
        (8, 8, "sparse"),
        (64, 8, "uniform"),
        (61, 2, "hot"),
        (61, 2, "sparse"),
    ],
)
def test_metadata_equals_reference(num_experts, top_k, kind):
    # the path with three launches, and the one with one
    for num_tokens, tile in ((0, 64), (1, 1024), (7, 64), (7, 1024), (128, 64)):
        assert_metadata(ids_of(kind, num_tokens, top_k, num_experts), num_experts, tile=tile)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(7, 2), (251, 8), pytest.param(1024, 1, marks=pytest.mark.exhaustive)],
)
def test_metadata_of_many_slots(num_experts, top_k):
    ids = ids_of("uniform", -(-1500 // top_k), top_k, num_experts)
    assert_metadata(ids, num_experts)
    live = int((ids < num_experts).sum())
    for slack in (0, 3):
        assert_metadata(ids, num_experts, max_rows=live + slack)


def test_metadata_of_many_tiles_runs_over_several_prefix_blocks(threshold):
    threshold(kernels, "_PREFIX_BLOCK", 4)
    assert_metadata(ids_of("zipf", 900, 1, 5), 5, tile=64)


def test_int32_ids_strided_ids_and_ids_out_of_range():
    ids = ids_of("uniform", 50, 4, 9)
    assert_metadata(ids.to(torch.int32), 9, tile=64)
    assert_metadata(ids[:, ::2], 9, tile=64)
    wild = ids.clone()
    wild[ids == 9] = torch.tensor([-1, 10, 2**40, -(2**40)]).repeat(50)[: int((ids == 9).sum())]
    for tile in (64, 1024):
        a = kernels.route_metadata(wild, 9, 200, tile=tile)
        b = kernels.route_metadata(ids, 9, 200, tile=tile)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["uniform", "hot", "dead", "sparse", "zipf"])
@pytest.mark.parametrize("num_experts", [1, 2, 61, 64, 257, 1024, 2047])
def test_metadata_equals_reference_everywhere(kind, num_experts):
    for num_tokens in TOKENS:
        for top_k in {1, 2, 8, min(num_experts, 16)}:
            assert_metadata(ids_of(kind, num_tokens, top_k, num_experts), num_experts)


def assert_tile_table(ids, num_experts, block_m):
    offsets, *_ = reference.route_metadata(ids, num_experts)
    with poisoned_empty():
        tile_expert, tile_row, num_tiles = kernels.tile_table(offsets, ids.numel(), block_m)
    bounds = offsets.tolist()
    expected = [(e, row) for e in range(num_experts) for row in range(bounds[e], bounds[e + 1], block_m)]
    used = num_tiles.item()
    assert used == len(expected) <= len(tile_expert) == len(tile_row)
    assert list(zip(tile_expert.tolist(), tile_row.tolist(), strict=True))[:used] == expected
    assert bool((tile_expert[used:] == num_experts).all())
    assert bool((tile_row[used:] == bounds[-1]).all())


@pytest.mark.parametrize("kind", ["uniform", "hot", "dead", "zipf"])
@pytest.mark.parametrize("num_experts", [1, 7, 64])
@pytest.mark.parametrize("block_m", [1, 16, 128])
def test_tile_table_lists_every_tile_once(kind, num_experts, block_m):
    for num_tokens in (0, 1, 128) if num_experts < 64 else (50,):
        assert_tile_table(ids_of(kind, num_tokens, 3, num_experts), num_experts, block_m)


def test_tile_table_of_many_experts():
    assert_tile_table(ids_of("zipf", 1000, 2, 300), 300, 16)


@pytest.mark.exhaustive
def test_tile_table_of_the_most_experts():
    assert_tile_table(ids_of("zipf", 1000, 2, 2047), 2047, 16)


def test_tile_bound_is_reached():
    # one expert with block_m - 1 rows more than a multiple, all others with one row
    block_m, num_experts = 16, 5
    ids = torch.cat([torch.zeros(block_m + 1), torch.arange(1, num_experts)])[:, None].long()
    offsets, *_ = reference.route_metadata(ids, num_experts)
    tile_expert, _, num_tiles = kernels.tile_table(offsets, len(ids), block_m)
    assert num_tiles.item() == len(tile_expert) == kernels.max_tiles(len(ids), num_experts, block_m)


@settings(max_examples=20)
@given(
    st.sampled_from([0, 1, 2, 7, 40, 67]),
    st.sampled_from([1, 2, 7, 16, 61]),
    st.integers(1, 5),
    st.sampled_from([64, 1024]),
    st.integers(0, 1000),
)
def test_any_ids(num_tokens, num_experts, top_k, tile, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts + 1, (num_tokens, top_k), generator=generator)
    assert_metadata(ids, num_experts, tile=tile)
    assert_tile_table(ids, num_experts, 16)
