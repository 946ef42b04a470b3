"""Loops made by a C++ compiler: what making one leaves alone, and what happens without a compiler."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S
from torch.utils.flop_counter import FlopCounterMode

from expertmesh.ops.cpu import compiled_loops
from expertmesh.ops.cpu.compiled_loops import Loop, example_values, make_loop


def scaled(x_MN, out_MN):
    out_MN.copy_(x_MN * 2)
    return x_MN.sum(1)


def make_scaled():
    return make_loop(scaled, (example_values(3, 5), torch.zeros(3, 5)))


@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("shape", [(2, 2), (64, 33), (1, 7), (5, 1)])
def test_runs_for_other_sizes(shape):
    x_MN, out_MN = torch.randn(shape), torch.full(shape, float("nan"))
    sums_M = make_scaled().run(x_MN, out_MN)
    assert torch.equal(out_MN, x_MN * 2)
    torch.testing.assert_close(sums_M, x_MN.sum(1))


@pytest.mark.usefixtures("cpp_compiler")
def test_making_one_leaves_the_caller_alone():
    before = torch.get_rng_state()
    with (
        FlopCounterMode(display=False) as counter,
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
    ):
        loop = make_loop(torch.mm, (example_values(3, 5), example_values(5, 7)))
    assert loop.problem == ""
    # not while it was compiled, but once for the comparison
    assert counter.get_total_flops() <= 2 * 2 * 3 * 5 * 7
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("cpp_compiler")
def test_threads_make_them_one_after_the_other():
    def scaled_by(factor):
        def function(x_MN):
            return x_MN * factor

        return function

    functions = [scaled_by(factor) for factor in (2.0, 3.0, 4.0)]
    called = torch.nn.Module.__call__
    with ThreadPoolExecutor(3) as pool:
        loops = list(pool.map(lambda f: make_loop(f, (example_values(3, 5),)), functions))
    x_MN = torch.randn(6, 4)
    for function, loop in zip(functions, loops, strict=True):
        assert torch.equal(loop.run(x_MN), function(x_MN))
    assert torch.nn.Module.__call__ is called
    assert torch.equal(torch.compile(lambda x: x + 1, backend="eager")(x_MN), x_MN + 1)


@pytest.mark.usefixtures("cpp_compiler")
def test_one_cache_serves_processors_with_other_instructions(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    problems = []
    for capability in (
        "avx512",
        "avx2",
        "avx512",
    ):  # where there are no such ones: the processor's own
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        # for one loop a header of its instructions costs more than it saves
        with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
            problems.append(make_scaled().problem)
    assert problems == ["", "", ""]


def without_a_compiler(missing):
    """In a process of its own, as torch remembers what it found."""
    from torch._inductor import config

    logging.basicConfig(force=True)  # to standard error, where a test run would keep it
    config.cpp.cxx = (None, missing)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = missing
    assert [make_scaled().run for _ in range(2)] == [None, None]


def test_a_compiler_that_is_switched_off_is_a_problem():
    with torch._dynamo.config.patch(disable=True):
        assert "TORCH_COMPILE_DISABLE" in make_scaled().problem


def test_without_a_compiler_it_says_why_once(tmp_path):
    missing, agent = str(tmp_path / "compiler"), Agent(1, tmp_path)
    codes = agent.run(without_a_compiler, missing, restarts=0, timeout_s=PATIENCE_S)
    assert codes == [0], agent.printed(0)
    (line,) = agent.printed(0).splitlines()
    assert "a slower way" in line
    assert missing in line


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (OSError("No space left on device\nTraceback"), "No space left on device"),
        (KeyError(), "KeyError"),
        ([lambda x_MN, out_MN: x_MN.sum(1)], "Tensor-likes are not close!"),  # does not write
        ([lambda x_MN, out_MN: out_MN.copy_(x_MN * 2).sum(0)], "Tensor-likes are not close!"),
    ],
)
def test_a_broken_compiler_is_a_problem(monkeypatch, made, problem):
    results = iter(made if isinstance(made, list) else [])

    def compile_(function, example, options):
        for result in results:
            return result
        raise made

    monkeypatch.setattr(compiled_loops, "_compile", compile_)
    loop = make_loop(scaled, (example_values(4, 4), torch.zeros(4, 4)))
    assert loop == Loop(None, problem)
