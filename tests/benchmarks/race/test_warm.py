"""Compiling before the race: what is to be compiled, in which shares, and how the autotuner is kept from running."""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import triton
from benchmarks.race.calls import Setting, plan
from benchmarks.race.layers import race_shape
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import chosen
from tests.support.experts_builds import (
    GPU_DTYPES,
    GPU_SHAPES,
    gpu_launches,
    gpu_options,
    step_launches,
)
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from benchmarks.race import warm


def test_shares_are_all_builds_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        JITFunction,
        "warmup",
        lambda self, grid, **values: asked.append((self.__name__, str(values))),
    )
    launches = warm.ours_of(chosen(("qwen3-8k", "mixtral-8k")), "sm_90")
    alone = warm.compile_launches(launches, "cuda", 0, 1)
    everything, asked[:] = sorted(asked), []
    assert len(everything) == alone > 20
    counts = [warm.compile_launches(launches, "cuda", part, 3) for part in range(3)]
    assert sum(counts) == alone
    assert max(counts) - min(counts) <= 1
    assert sorted(asked) == everything
    names = {name for name, _ in everything}
    assert {
        "_up",
        "_rows",
        "_hidden_grad",
        "_rows_transposed",
        "_sum_rows",
        "_split_product",
    } <= names


def test_the_name_of_the_gpu_is_asked_for_in_another_process():
    asked = []
    assert warm.from_outside(lambda: asked.append(None) or "sm_89") == "sm_89"
    assert asked == []
    with pytest.raises(RuntimeError, match="ended without"):
        warm.from_outside(lambda: "")


def test_a_share_that_fails_is_counted_and_the_others_run(tmp_path):
    def share(part, of):
        (tmp_path / f"{part} of {of}").touch()
        if part == 1:
            os._exit(3)
        assert part != 2

    assert warm.shared_out(share, 4) == 2
    assert len(list(tmp_path.iterdir())) == 4


def test_candidates_are_compiled_and_none_is_run():
    asked = []

    class Kernel:
        arg_names = ("x",)

        def warmup(self, *args, grid, **options):
            asked.append((args, grid, options["BLOCK"]))

    tuner = object.__new__(Autotuner)
    tuner.fn = Kernel()
    tuner.configs = [triton.Config({"BLOCK": n}) for n in range(5)]
    run = Autotuner.run
    with warm.only_compiling(1, 2):
        tuner[(7,)]("x")
    assert [block for _, _, block in asked] == [1, 3]
    assert asked[0][:2] == (("x",), (7,))
    assert Autotuner.run is run


def test_a_race_lets_liger_tune_quickly(monkeypatch, tmp_path):
    """A candidate takes an eighth of a second otherwise, and the part that has 240 of them is killed before it times
    anything."""
    tuner = object.__new__(Autotuner)
    tuner._do_bench = None
    kernels = {"_up": tuner, "BLOCK_M_TOKEN": 64}
    for name, members in (("", {}), (".ops", {}), (".ops.fused_moe_kernels", kernels)):
        module = ModuleType(f"liger_kernel{name}")
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None), []
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises((AssertionError, ValueError)):  # no GPU is called "meta"
        race_shape(Keep(tmp_path / "part.json"), shape="qwen3-8k", device="meta")
    assert tuner._do_bench is not None


def test_what_gpu_tests_launch_is_built_before_them():
    (builds,) = (part for part in plan("kernels", Setting())[0] if part.name == "builds")
    assert builds.arguments["tests"]
    launches = gpu_launches("sm_90")
    assert len({launch.key for launch in launches}) == len(launches)
    for dtype in GPU_DTYPES:
        again = step_launches("sm_90", dtype, shape=GPU_SHAPES[1], **gpu_options(1))
        assert {one.key for one in again} <= {launch.key for launch in launches}
