"""Compiling before the race: what is to be compiled, in which shares, and how the autotuner is kept from running."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    """Give a module of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_shares_are_all_builds_once(module, monkeypatch):
    warm, shapes = module("race_warm"), module("race_shapes").chosen(("qwen3-8k", "mixtral-8k"))
    from triton.runtime.jit import JITFunction

    asked = []
    monkeypatch.setattr(
        JITFunction,
        "warmup",
        lambda self, grid, **values: asked.append((self.__name__, str(values))),
    )
    alone = warm.compile_ours(shapes, "sm_90", 0, 1)
    everything, asked[:] = sorted(asked), []
    assert len(everything) == alone > 20
    counts = [warm.compile_ours(shapes, "sm_90", part, 3) for part in range(3)]
    assert sum(counts) == alone
    assert max(counts) - min(counts) <= 1
    assert sorted(asked) == everything
    names = {name for name, _ in everything}
    assert {"_up", "_rows", "_hidden_grad", "_rows_transposed", "_sum_rows"} <= names


def test_candidates_are_compiled_and_none_is_run(module):
    import triton
    from triton.runtime.autotuner import Autotuner

    asked = []

    class Kernel:
        arg_names = ("x",)

        def warmup(self, *args, grid, **options):
            asked.append((args, grid, options["BLOCK"]))

    tuner = object.__new__(Autotuner)
    tuner.fn = Kernel()
    tuner.configs = [triton.Config({"BLOCK": n}) for n in range(5)]
    run = Autotuner.run
    with module("race_warm").only_compiling(1, 2):
        tuner[(7,)]("x")
    assert [block for _, _, block in asked] == [1, 3]
    assert asked[0][:2] == (("x",), (7,))
    assert Autotuner.run is run


def test_more_cores_take_less_time(module, monkeypatch):
    warm, shapes = module("race_warm"), module("race_shapes").chosen(())
    monkeypatch.setattr(warm, "jobs", lambda: 1)
    alone = warm.expected_s(shapes, with_liger=True)
    assert warm.expected_s(shapes, with_liger=False) < alone / 3
    monkeypatch.setattr(warm, "jobs", lambda: 16)
    assert warm.expected_s(shapes, with_liger=True) < alone / 10


def test_a_process_that_takes_too_long_is_ended(module, monkeypatch):
    warm, shapes = module("race_warm"), module("race_shapes").chosen(("qwen3-8k",))
    ended = []

    class Process:
        def __init__(self, command):
            self.command = command

        def wait(self, seconds=None):
            if seconds is not None:
                raise warm.subprocess.TimeoutExpired(self.command, seconds)

        def kill(self):
            ended.append(self.command[-1])

    monkeypatch.setattr(warm, "jobs", lambda: 2)
    monkeypatch.setattr(warm.subprocess, "Popen", Process)
    assert warm.warm(shapes, limit_s=0.0) >= 0.0
    assert ended == ["qwen3-8k"] * 2
