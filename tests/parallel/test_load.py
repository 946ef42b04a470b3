"""What a layer keeps of its calls."""

import torch

from expertmesh.parallel.experts.load_record import LoadRecord


def test_counts_are_those_of_the_last_call_of_their_mode():
    """Also when they are not read before the next call, and when they are read twice."""
    load = LoadRecord(2, num_ranks=1)
    assert load.counts() is None
    for counts in ([1, 2], [3, 4]):
        load.note(torch.tensor(counts))
    with torch.no_grad():
        assert load.counts() is None
        load.note(torch.tensor([5, 6]))
        assert load.counts() == (5, 6)
    assert load.counts() == load.counts() == (3, 4)
