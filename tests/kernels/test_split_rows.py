"""Splitting a hot expert's weight gradient: the list of pieces, the sums, the bound on the workspace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.experts_builds import step_launches
from tests.support.experts_case import ExpertsCase
from tests.support.poison import poisoned_empty

from expertmesh.kernels import moe_wgrad, split_rows, tiles
from expertmesh.kernels.tile_tables import GEMMS
from expertmesh.kernels.tiles import Tile

SPLIT = dict.fromkeys(GEMMS, Tile(16, 16, 16, 4, 1, group_m=3)) | {"sharing": 60, "piece_rows": 16}
BLOCK_K = 8


def list_of(counts, slack, piece_rows):
    """The used pieces (start, end, expert, place) and the split experts (expert, place, count)."""
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    with poisoned_empty():
        cut = split_rows.cut(offsets, piece_rows, sum(counts) + slack, 4, 3)
    used, split = int(cut.num_pieces), int(cut.num_split)
    columns = (cut.start, cut.end, cut.expert, cut.place)
    hot = (cut.split_expert, cut.split_place, cut.split_count)
    listed = list(zip(*(c[:used].tolist() for c in columns), strict=True))
    return cut, listed, list(zip(*(c[:split].tolist() for c in hot), strict=True))


@settings(max_examples=30)
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 60)), min_size=1, max_size=8),
    st.integers(0, 50),
    st.integers(1, 30),
)
def test_pieces_are_every_experts_rows_once(counts, slack, piece_rows):
    num_rows = sum(counts) + slack
    if num_rows == 0:
        return
    cut, listed, hot = list_of(counts, slack, piece_rows)
    assert len(listed) <= len(cut.start)
    assert len(hot) <= len(cut.split_expert)
    start = 0
    places = []
    for e, count in enumerate(counts):
        own = [p for p in listed if p[2] == e]
        assert own[0] == listed[e]
        assert [p[0] for p in own] == list(range(start, start + max(count, 1), piece_rows))
        assert [p[1] for p in own[:-1]] == [p[0] for p in own[1:]]
        assert own[-1][1] == start + count
        if len(own) == 1:
            assert own[0][3] == -1
        else:
            assert (e, own[0][3], len(own)) in hot
            assert [p[3] for p in own] == list(range(own[0][3], own[0][3] + len(own)))
            places += [p[3] for p in own]
        start += count
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= cut.work.shape[0]
    assert len(hot) == sum(count > piece_rows for count in counts)


@pytest.mark.parametrize("num_rows", [1, 500, 70_000])
@pytest.mark.parametrize("fewest", [16, 512])
def test_pieces_are_whole_steps_and_few(num_rows, fewest):
    rows = split_rows.rows_of_pieces(num_rows, 16, fewest, BLOCK_K)
    assert rows % BLOCK_K == 0
    assert rows >= fewest
    assert -(-num_rows // rows) <= 16


@pytest.fixture
def added(monkeypatch):
    """How often sums of pieces were added up."""
    calls = []
    add = moe_wgrad.add
    monkeypatch.setattr(moe_wgrad, "add", lambda p, *a, **k: (calls.append(p), add(p, *a, **k)))
    return calls


@pytest.mark.parametrize(
    ("shape", "kind", "tma"),
    [
        ((40, 24, 20, 5, 2), "zipf", False),
        ((50, 16, 24, 4, 1), "hot", True),
        ((40, 19, 21, 2, 2), "dropped", False),
        ((40, 20, 24, 2, 2), "dropped", True),
        ((40, 16, 16, 1, 1), "uniform", False),
    ],
)
def test_split_gradients_follow_the_two_times_rule(use_config, added, shape, kind, tma):
    use_config(**SPLIT, tma=tma)
    case = ExpertsCase.draw(shape, kind=kind)

    def run():
        with poisoned_empty():
            return case.run("triton")

    case.check(run)
    assert [int(p.num_split) > 0 for p in added] == [True, True]


def test_bits_of_split_gradients_do_not_depend_on_the_grid_or_the_run(use_config, added):
    case = ExpertsCase.draw((40, 16, 24, 3, 2), kind="zipf")
    use_config(**SPLIT)
    first = case.run("triton")
    for num_programs in (1, 7):
        use_config(num_programs=num_programs)
        again = case.run("triton")
        assert all(torch.equal(first[name], again[name]) for name in first)
    assert len(added) == 6


def test_split_gradients_are_added_to_buffers(use_config, added):
    use_config(**SPLIT)
    case = ExpertsCase.draw((90, 24, 40, 5, 2), kind="zipf", dtype=torch.bfloat16)
    x, m = case.x_TD.contiguous(), case.metadata
    rows = moe_wgrad.Rows.uncut(m.offsets_E, m.token_of_row_N, m.slot_of_row_N)
    dense = torch.randn(180, 48).bfloat16()
    sizes = {"num_rows": 180, "num_experts": 5, "dim": 24, "hidden_dim": 24, "num_branches": 2}
    config = tiles.choose_config(x.device, x.dtype, **sizes)
    fresh, buffer = torch.empty(5, 48, 24), torch.randn(5, 48, 24)
    before = buffer.clone()
    for out, accumulate in ((fresh, False), (buffer, True)):
        moe_wgrad.weight_grad(
            dense,
            x,
            rows,
            config,
            config.w_in_grad,
            gathered_rows=False,
            out=out,
            accumulate=accumulate,
        )
    assert torch.equal(buffer, before + fresh)
    assert len(added) == 2


def test_only_narrow_layers_are_split_and_the_workspace_is_bounded():
    """On a GPU of 132 multiprocessors, as the host code decides from shapes."""

    def adds(shape):
        launches = step_launches("sm_90", torch.bfloat16, shape=shape)
        return [launch.values["work_ptr"] for launch in launches if launch.name == "add_pieces"]

    assert len(adds((8192, 512, 256, 64, 2))) == 2
    assert adds((4096, 4096, 14336, 8, 2)) == []  # one expert's tiles fill the GPU
    assert adds((8, 512, 256, 64, 8)) == []  # decoding
    most_bytes = 2 * 132 * 128 * 256 * 4
    for shape in ((8192, 512, 256, 64, 2), (65536, 128, 128, 16, 2), (4096, 2048, 768, 64, 8)):
        assert all(0 < work.numel() * 4 < most_bytes for work in adds(shape))


def test_another_number_of_tokens_compiles_nothing_new():
    def compiled(num_tokens):
        shape = (num_tokens, 512, 256, 64, 2)
        return {launch.key for launch in step_launches("sm_90", torch.bfloat16, shape=shape)}

    # rows are cut into 18, 17, ... pieces: lists of other lengths, at other places in one allocation
    few, many = compiled(4096), [compiled(4096 + 256 * n) for n in range(1, 5)]
    assert all(keys == few for keys in many)
