"""The benchmarks refuse to report wrong results, and what they compute from times is right."""

import importlib
from pathlib import Path

import pytest
import torch

from expertmesh.testing.numerics import assert_close_fp64

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    """Give a module of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_wrong_results_are_not_reported(module):
    harness = module("harness")

    def wrong():
        raise AssertionError("y is off")

    with pytest.raises(harness.ResultsAreWrongError, match="y is off"):
        harness.checked("layer", wrong)
    harness.checked("layer", lambda: None)


def test_rounds_are_interleaved_and_slow_ones_run_once(module):
    harness = module("harness")
    calls = []
    contenders = [
        harness.Contender(name, lambda name=name: calls.append(name), slow=name == "c")
        for name in "abc"
    ]
    timings = harness.interleaved(contenders, rounds=4, warmup=1)
    assert [timing.rounds for timing in timings] == [4, 4, 1]
    assert calls.count("a") == 5
    assert calls.count("c") == 1
    assert calls[:4] == ["a", "b", "b", "a"]  # the first of the round changes


def test_cpu_clock_counts_one_thread_only(module):
    harness = module("harness")
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="--threads 1"):
            harness.interleaved([harness.Contender("a", lambda: None)], rounds=1, clock="cpu")
    finally:
        torch.set_num_threads(1)


def test_slope_of_powers(module):
    slope = module("routing_scaling").slope
    for power in (0.5, 1.0, 2.0):
        points = [(float(t), 3.0 * t**power) for t in (1, 10, 100, 1000)]
        assert_close_fp64(slope(points), power, what="slope")


def test_routing_check_sees_wrong_maps(module):
    routing = module("routing_scaling")
    routing.check()
    with pytest.raises(AssertionError, match="moving rows"):
        routing.check(lambda x, metadata: torch.zeros(1000, 8))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layer_check_sees_a_scale_bug(module, activation):
    pytest.importorskip("transformers")
    layer = module("layer")
    case = layer.Case(64, 32, 48, 4, 2, activation, torch.float32)
    layer.check(case)

    def off(case):
        made = layer.make_layer(case)
        made.register_forward_hook(lambda module, inputs, output: (output[0] * 1.005, output[1]))
        return made

    with pytest.raises(AssertionError, match="y "):
        layer.check(case, make=off)


@pytest.mark.slow
def test_layer_benchmark_runs_and_writes(module, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"tokens": 32, "dim": 16, "hidden_dim": 24, "shapes": ("4x2",), "decode": (1,)}
    module("layer").main(threads=1, rounds=1, dtypes=("float32",), out=tmp_path, **sizes)
    text = (tmp_path / "layer_cpu_202611.md").read_text()
    for name in (
        "expertmesh",
        "transformers grouped_mm",
        "transformers batched_mm",
        "einsum",
        "matrix products",
    ):
        assert name in text
    assert (tmp_path / "layer_cpu_202611.json").exists()
