"""The first contact of ranks on a key-value store that dead ranks have used before."""

import threading

import pytest
import torch
import torch.distributed as dist
from tests.support.patience import PATIENCE_S

from expertmesh.comm import start
from expertmesh.comm.start import fresh_name
from expertmesh.errors import ConfigError


def names_of_a_life(store, num_ranks=4, timeout_s=PATIENCE_S):
    """What the ranks of one life agree on, in threads; the last rank comes first."""
    names = [None] * num_ranks

    def join(rank):
        names[rank] = fresh_name(store, rank, num_ranks, timeout_s=timeout_s)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(num_ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return names


def test_each_life_has_a_name_of_its_own():
    store = dist.HashStore()
    lives = [names_of_a_life(store) for _ in range(3)]
    assert all(len(set(names)) == 1 and None not in names for names in lives)
    assert len({names[0] for names in lives}) == len(lives)


def test_questions_of_ranks_that_died_before_an_answer_do_no_harm():
    store = dist.HashStore()
    store.add("expertmesh/questions", 3)
    (name,) = set(names_of_a_life(store))
    assert name is not None


def test_fewer_or_more_ranks_than_before():
    store = dist.HashStore()
    for num_ranks in (4, 2, 1, 5):
        names = names_of_a_life(store, num_ranks)
        assert len(set(names)) == 1 and None not in names


def test_a_rank_that_never_comes_is_named():
    store = dist.HashStore()
    with pytest.raises(dist.DistError, match="ranks 1, 2 did not come within 0.05 s"):
        fresh_name(store, 0, 3, timeout_s=0.05)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_each_rank_takes_its_gpu(monkeypatch, backend):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for local_rank in (1, 2):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        error = ValueError if local_rank < 2 else ConfigError  # nobody to meet; no GPU
        with pytest.raises(error):
            start.start_group(backend, timeout_s=1.0)
    assert taken == [1]
