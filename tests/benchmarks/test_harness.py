"""The benchmarks refuse to report wrong results, and what they compute from times is right."""

import pytest
import torch
import torch.distributed as dist
from tests.oracle.numerics import assert_close_fp64
from tests.support import stand_ins

from benchmarks import harness, layer, routing_scaling
from benchmarks.race import adapters


def test_wrong_results_are_not_reported():
    def wrong():
        raise AssertionError("y is off")

    with pytest.raises(harness.ResultsAreWrongError, match="y is off"):
        harness.checked("layer", wrong)
    harness.checked("layer", lambda: None)


def test_rounds_are_interleaved_and_slow_ones_run_once():
    calls = []
    contenders = [harness.Contender(name, lambda name=name: calls.append(name), slow=name == "c") for name in "abc"]
    timings = harness.interleaved(contenders, rounds=4, warmup=1)
    assert [timing.rounds for timing in timings] == [4, 4, 1]
    assert calls.count("a") == 5
    assert calls.count("c") == 1
    assert calls[:4] == ["a", "b", "b", "a"]  # the first of the round changes


def test_cpu_clock_counts_one_thread_only():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="--threads 1"):
            harness.interleaved([harness.Contender("a", lambda: None)], rounds=1, clock="cpu")
    finally:
        torch.set_num_threads(1)


def test_slope_of_powers():
    for power in (0.5, 1.0, 2.0):
        points = [(float(t), 3.0 * t**power) for t in (1, 10, 100, 1000)]
        assert_close_fp64(routing_scaling.slope(points), power, what="slope")


def test_routing_check_sees_wrong_maps():
    routing_scaling.check()
    with pytest.raises(AssertionError, match="moving rows"):
        routing_scaling.check(lambda x, metadata: torch.zeros(1000, 8))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layer_check_sees_a_scale_bug(activation):
    pytest.importorskip("transformers")
    case = layer.Case(64, 32, 48, 4, 2, activation, torch.float32)
    layer.check(case)

    def off(case):
        made = layer.make_layer(case)
        made.register_forward_hook(lambda module, inputs, output: (output[0] * 1.005, output[1]))
        return made

    with pytest.raises(AssertionError, match="y "):
        layer.check(case, make=off)


@pytest.fixture
def all_peers():
    """Stand-ins for the packages of other layers."""
    stand_ins.install()
    yield
    stand_ins.remove()
    if dist.is_initialized():  # some of them ask for a group
        dist.destroy_process_group()


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_layers_of_gpu_packages_are_checked(all_peers, activation):
    """Each has our weights from the beginning, and gradients of them."""
    layer.check(layer.Case(64, 32, 48, 4, 2, activation, torch.bfloat16))


def test_layers_of_gpu_packages_decode_with_our_weights(all_peers):
    found, _ = layer.contenders(layer.Case(3, 32, 48, 4, 2, "swiglu", torch.bfloat16, False))
    assert {one.name for one in found} >= set(adapters.PACKAGES["swiglu"])
    for one in found:
        one.prepare(0)
        one.run()


@pytest.mark.slow
def test_layer_benchmark_runs_and_writes(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"tokens": 32, "dim": 16, "hidden_dim": 24, "shapes": ("4x2",), "decode": (1,)}
    layer.main(threads=1, rounds=1, dtypes=("float32",), out=tmp_path, **sizes)
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
