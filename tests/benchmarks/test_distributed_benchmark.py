"""The benchmark of the spread layer: its table, its routing, and that it reports nothing when results are wrong."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[2]


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    names = ("distributed_layer", "distributed_ranks", "layer_peers", "harness")
    return tuple(importlib.import_module(f"benchmarks.{name}") for name in names)


def test_a_small_run_reports(modules, tmp_path, monkeypatch, capsys):
    main, *_ = modules
    monkeypatch.setattr(main, "versions", dict)
    small = {"tokens": 16, "dim": 32, "hidden_dim": 32, "num_experts": 4, "rounds": 2}
    main.main(
        ranks=(1, 2), activations=("gelu",), dtypes=("float32",), imbalances=(2.0,), name="x",
        out=tmp_path, **small,
    )  # fmt: skip
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [(row["ranks"], row["contender"]) for row in rows] == [(1, main.OURS), (2, main.OURS)]
    one, two = rows
    assert one["of one rank's"] == 1.0
    ratio = two["CPU ms per rank"] / one["CPU ms per rank"]
    assert two["of one rank's"] == pytest.approx(ratio)
    assert one["MB sent"] == 0 < two["MB sent"]
    assert "DeepSpeed: not installed" in (tmp_path / "x.md").read_text()


def test_routing_is_as_uneven_as_asked(modules):
    _, ranks, peers, _ = modules
    case = peers.Case(2048, 64, 64, 16, 2, "gelu", torch.float32)
    layer = peers.make_layer(case)
    shift = ranks.shift_for(2.0, layer, case)
    _, stats = layer(torch.randn(1 << 14, 64) + shift)
    counts = stats.num_tokens_per_expert_E.double()
    assert 1.9 < float(counts.max() / counts.mean()) < 2.1
    assert not ranks.shift_for(None, layer, case).any()


def wrong_results(work):
    """On a rank: the check with a layer that forgets the others' tokens."""
    from benchmarks import distributed_ranks as ranks

    ranks._spread = lambda layer: layer
    ranks.check(work)


def test_wrong_results_are_not_reported(modules):
    _, ranks, peers, harness = modules
    case = peers.Case(2048, 64, 64, 16, 2, "gelu", torch.float32)
    work = ranks.Workload(case, None, ())
    pool = RankPool(2)
    try:
        pool.run(ranks.check, work)
        with pytest.raises(harness.ResultsAreWrongError, match="w_in gradient on 2 ranks"):
            harness.checked("layer", lambda: pool.run(wrong_results, work))
    finally:
        pool.stop()
