"""Windows of tokens by a global sample cursor."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.data.order import evenly_spaced, permutation
from expertmesh.data.windows import Windows


def windows(num_tokens=101, seq_len=10, seed=0):
    return Windows(np.arange(num_tokens, dtype=np.uint16), seq_len, seed)


def test_targets_are_the_next_tokens_and_an_epoch_has_every_window_once():
    data = windows()
    inputs, targets = data.batch(0, data.num_windows)
    assert inputs.dtype == torch.int64 and torch.equal(targets, inputs + 1)
    assert sorted(inputs.flatten().tolist()) == list(range(100))


@pytest.mark.parametrize("num_tokens, count", [(10, 0), (11, 1), (20, 1), (21, 2)])
def test_a_window_needs_one_token_more_than_its_length(num_tokens, count):
    assert windows(num_tokens).num_windows == count


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    start=st.integers(0, 40),
    seed=st.integers(0, 2**63),
)
def test_samples_do_not_depend_on_the_batch_size(sizes, start, seed):
    data = windows(seed=seed)
    whole, _ = data.batch(start, sum(sizes))
    parts, place = [], start
    for size in sizes:
        parts.append(data.batch(place, size)[0])
        place += size
    assert torch.equal(torch.cat(parts), whole)


def test_epochs_and_seeds_have_their_own_order():
    orders = [tuple(permutation(100, 0, epoch)) for epoch in range(3)]
    orders += [tuple(permutation(100, seed, 0)) for seed in (1, 2**40)]
    assert len(set(orders)) == 5
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_the_order_is_the_same_for_ever():
    # Written down once: a run must resume on another version of NumPy.
    assert permutation(11, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 10, 6, 7]
    assert permutation(11, 5, 2).tolist() == [3, 5, 9, 2, 7, 10, 1, 8, 0, 6, 4]


def test_evaluation_samples_are_spread_evenly():
    assert evenly_spaced(100, 4) == [0, 25, 50, 75]
    assert evenly_spaced(100, 1000) == evenly_spaced(100, None) == list(range(100))
