"""The order of rows by expert: invariants over many shapes, and linear-time behaviour is in the benchmarks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from expertmesh.errors import ConfigError
from expertmesh.functional import RouteMetadata, route_metadata


@st.composite
def routings(draw):
    num_experts = draw(st.sampled_from([1, 2, 3, 7, 16, 61, 300]))
    top_k = draw(st.integers(1, 5))
    num_tokens = draw(st.sampled_from([0, 1, 2, 7, 40, 129]))
    kind = draw(st.sampled_from(["uniform", "hot", "dead", "some"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    top = num_experts if kind == "uniform" else num_experts + 1
    ids = torch.randint(0, top, (num_tokens, top_k), generator=generator)
    if kind == "hot":
        ids.fill_(num_experts // 2)
    if kind == "dead":
        ids.fill_(num_experts)
    return num_experts, ids


@settings(max_examples=150)
@given(routings(), st.sampled_from([torch.int64, torch.int32]))
def test_invariants(routing, dtype):
    num_experts, ids_TK = routing
    metadata = route_metadata(ids_TK.to(dtype), num_experts)
    ids_N = ids_TK.flatten()
    num_slots = len(ids_N)
    offsets = metadata.offsets_E.tolist()
    assert all(leaf.dtype == torch.int32 for leaf in tree_leaves(metadata))
    assert offsets == [int((ids_N < e).sum()) for e in range(num_experts + 1)]
    # row_of_slot is a permutation, slot_of_row its inverse
    assert torch.equal(metadata.row_of_slot_N.sort().values, torch.arange(num_slots, dtype=torch.int32))
    assert torch.equal(metadata.slot_of_row_N[metadata.row_of_slot_N], torch.arange(num_slots, dtype=torch.int32))
    assert torch.equal(metadata.token_of_row_N, metadata.slot_of_row_N // ids_TK.shape[1])
    # sorted by expert, stable within one, dead slots behind all
    by_row = ids_N[metadata.slot_of_row_N]
    assert torch.equal(by_row, ids_N.sort().values)
    step = metadata.slot_of_row_N.diff()
    assert bool((step[by_row.diff() == 0] > 0).all())
    assert torch.equal(metadata.row_of_slot_N < offsets[-1], ids_N < num_experts)


@settings(max_examples=60)
@given(routings(), st.integers(0, 40))
def test_equals_reference_and_max_rows_cuts_the_tail(routing, slack):
    num_experts, ids_TK = routing
    live = int((ids_TK < num_experts).sum())
    full = route_metadata(ids_TK, num_experts)
    for max_rows in (None, live + slack):
        ours = route_metadata(ids_TK, num_experts, max_rows=max_rows)
        with torch.device("meta"):  # the ids say where the maps are
            oracle = route_metadata(ids_TK, num_experts, max_rows=max_rows, backend="reference")
        for a, b in zip(tree_leaves(ours), tree_leaves(oracle), strict=True):
            assert torch.equal(a, b)
        num_rows = ids_TK.numel() if max_rows is None else min(ids_TK.numel(), max_rows)
        assert torch.equal(ours.slot_of_row_N, full.slot_of_row_N[:num_rows])


def test_large_inputs_take_the_same_order():
    ids_TK = torch.randint(0, 257, (40000, 2))
    metadata = route_metadata(ids_TK, 256)
    order = torch.sort(ids_TK.flatten(), stable=True).indices
    assert torch.equal(metadata.slot_of_row_N.long(), order)


def test_is_a_pytree():
    metadata = route_metadata(torch.tensor([[0, 1], [1, 0]]), 2)
    moved = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, metadata)
    assert isinstance(moved, RouteMetadata)
    assert torch.equal(moved.offsets_E, metadata.offsets_E + 1)


@pytest.mark.parametrize(
    ("ids", "num_experts"),
    [
        (torch.zeros(3, dtype=torch.int64), 2),
        (torch.zeros(3, 2), 2),
        (torch.zeros(3, 2, dtype=torch.bool), 2),
        (torch.full((3, 2), 3), 2),
        (torch.full((3, 2), -1), 2),
        (torch.zeros(3, 2, dtype=torch.int64), 0),
    ],
)
def test_bad_ids_are_told(ids, num_experts):
    with pytest.raises(ConfigError) as error:
        route_metadata(ids, num_experts)
    assert "\n" not in str(error.value)


def test_opcheck():
    ids_TK = torch.randint(0, 5, (9, 2))
    for max_rows in (None, 12):
        torch.library.opcheck(torch.ops.expertmesh.route_metadata.default, (ids_TK, 4, max_rows))
