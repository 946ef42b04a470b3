"""Runs of experts with padded places, and the backward that takes them together."""

import pytest
import torch
from tests.support.experts_case import ExpertsCase
from tests.support.poison import poisoned_empty

from expertmesh.ops.cpu.products import gemm_rows
from expertmesh.ops.experts import torch_backward as expert_loop_backward
from expertmesh.ops.experts.expert_spans import make_runs

CPU = torch.device("cpu")
COUNTS = [0, 70, 3, 0, 129, 64, 0, 33, 0]


def bounds_of(counts):
    return [sum(counts[:e]) for e in range(len(counts) + 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_places", [0, 100, 150, 10_000])
def test_runs_hold_every_row_once_and_repeat_the_last_in_the_padding(dtype, most_places):
    runs = make_runs(bounds_of(COUNTS), most_places, CPU, dtype, is_narrow=True)
    num_rows = sum(COUNTS)
    rows = torch.arange(num_rows)
    for run in runs:
        assert run.num_places <= most_places or len(run.experts) == 1
        taken = run.split(run.taken(rows))
        kept = run.split(run.without_padding(run.taken(rows + 1)))
        for e, start, places, weighed in zip(run.experts, run.starts, taken, kept, strict=True):
            n = COUNTS[e]
            assert start == bounds_of(COUNTS)[e]
            assert len(places) == gemm_rows(n, CPU, dtype, is_coarse=True)
            assert places.tolist() == [start + min(i, n - 1) for i in range(len(places))]
            assert (weighed[:n] == places[:n] + 1).all()
            assert not weighed[n:].any()
    assert [e for run in runs for e in run.experts] == [e for e, n in enumerate(COUNTS) if n]
    assert runs[-1].rows.stop == num_rows
    whole = torch.full((num_rows + max(run.padding for run in runs),), -1)
    for run in runs:
        for places, out in zip(run.split(run.taken(rows)), run.rows_of(whole), strict=True):
            out.copy_(places)
    assert torch.equal(whole[:num_rows], rows)


def test_experts_go_together_up_to_the_limit():
    def experts(most_places):
        runs = make_runs(bounds_of(COUNTS), most_places, CPU, torch.bfloat16, is_narrow=True)
        return [run.experts for run in runs]

    assert experts(0) == [[1], [2], [4], [5], [7]]
    assert experts(10_000) == [[1, 2, 4, 5, 7]]
    assert experts(gemm_rows(70, CPU, torch.bfloat16, is_coarse=True) + 3) == [
        [1, 2],
        [4],
        [5],
        [7],
    ]


@pytest.mark.parametrize("kind", ["uniform", "sparse", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [0, 8000, 1 << 18])
@pytest.mark.parametrize("options", [{}, {"recompute_h": True}])
def test_backward_in_runs(threshold, kind, dtype, limit, options):
    case = ExpertsCase.draw((200, 16, 24, 6, 2), kind=kind, dtype=dtype, bias=True)
    threshold(expert_loop_backward, "RUN_ELEMENTS", limit)
    with poisoned_empty():
        case.check(lambda: case.run("torch", **options))


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_nothing_of_an_expert_reaches_its_neighbours(spoiled):
    """Not even NaN, which zeros in one factor of a product would let pass."""
    torch.manual_seed(0)
    case = ExpertsCase.draw((300, 16, 24, 3, 1), dtype=torch.bfloat16)
    clean = case.run("torch")
    case.w_in_EGFD[spoiled] = torch.nan
    found = case.run("torch")
    for name in ("w_in", "w_out"):
        for e in range(3):
            if e == spoiled:
                assert found[name][e].isnan().any()
            else:
                assert torch.equal(found[name][e], clean[name][e])
