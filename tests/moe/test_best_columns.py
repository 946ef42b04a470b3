"""The choice of the K best columns on a CPU against a stable sort."""

import math

import pytest
import torch

from expertmesh.moe.selection import best_columns


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("kind", ["plain", "ties", "infinite"])
def test_best_columns_are_those_of_a_stable_sort(kind, top_k):
    scores = torch.randn(200, 6)
    if kind == "ties":
        scores = scores.round()
    if kind == "infinite":
        scores = scores.masked_fill(torch.rand(200, 6) < 0.7, -math.inf)
    ids = best_columns(scores, top_k)
    expected = scores.sort(dim=-1, descending=True, stable=True).values[:, :top_k]
    assert torch.equal(scores.gather(1, ids), expected)
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_not_a_number_is_the_largest_as_in_topk():
    scores = torch.tensor([[0.0, math.nan, 1.0], [math.nan] * 3])
    assert best_columns(scores, 2)[0].tolist() == [1, 2]
    assert len(set(best_columns(scores, 2)[1].tolist())) == 2


def test_no_tokens():
    assert best_columns(torch.empty(0, 4), 2).shape == (0, 2)
