"""The benchmark of the spread layer: its table, its routing, and that it reports nothing when results are wrong."""

import json

import pytest
import torch
from tests.support.ranks import RankPool

from benchmarks import distributed_layer, distributed_ranks, harness, layer_peers


def test_a_small_run_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed_layer, "versions", dict)
    small = {"tokens": 16, "dim": 32, "hidden_dim": 32, "num_experts": 4, "rounds": 2}
    distributed_layer.main(
        ranks=(1, 2), activations=("gelu",), dtypes=("float32",), imbalances=(2.0,), name="x",
        out=tmp_path, **small,
    )  # fmt: skip
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["ranks"], row["contender"]) for row in rows] == [
        (1, distributed_ranks.OURS),
        (2, distributed_ranks.OURS),
    ]
    one, two = rows
    assert one["of one rank's"] == 1.0
    ratio = two["CPU ms per rank"] / one["CPU ms per rank"]
    assert two["of one rank's"] == pytest.approx(ratio)
    assert one["MB sent"] == 0 < two["MB sent"]
    assert "DeepSpeed: not installed" in (tmp_path / "x.md").read_text()


def test_routing_is_as_uneven_as_asked():
    case = layer_peers.Case(2048, 64, 16, 16, 2, "gelu", torch.float32)  # too narrow for a loop to be compiled
    layer = layer_peers.make_layer(case)
    shift = distributed_ranks.shift_for(2.0, layer, case)
    _, stats = layer(torch.randn(1 << 14, 64) + shift)
    counts = stats.num_tokens_per_expert_E.double()
    assert 1.9 < float(counts.max() / counts.mean()) < 2.1
    assert not distributed_ranks.shift_for(None, layer, case).any()


def wrong_results(work):
    """On a rank: the check with a layer that forgets the others' tokens."""
    distributed_ranks._spread = lambda layer: layer
    distributed_ranks.check(work)


def test_wrong_results_are_not_reported():
    case = layer_peers.Case(2048, 64, 64, 16, 2, "gelu", torch.float32)
    work = distributed_ranks.Workload(case, None, ())
    pool = RankPool(2)
    try:
        pool.run(distributed_ranks.check, work)
        with pytest.raises(harness.ResultsAreWrongError, match="w_in gradient on 2 ranks"):
            harness.checked("layer", lambda: pool.run(wrong_results, work))
    finally:
        pool.stop()
