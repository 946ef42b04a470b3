"""Compile before the race, in several processes: Triton compiles one kernel after another, for minutes in all.

    python -m benchmarks.race_warm --shapes qwen3-8k --part 0 --of 8

Fills Triton's cache on disk for our kernels and for Liger-Kernel's, whose autotuner tries about 240 builds per width of
the layer. Nothing is timed here and no result is kept: a process takes every n-th build.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import tyro
from benchmarks.peer_parts import absent
from benchmarks.race_shapes import RaceShape, chosen, decode_shapes

SECONDS_PER_BUILD = 2.5
"""Of one core, with Triton 3.6: what a build of ours took at most in tests without a GPU, and a half more."""
LIGER_BUILDS = 240
OUR_BUILDS = 16
MOST_JOBS = 16
_QUICK_BENCH_MS = (5, 20)
"""Warm-up and repetitions of one autotuning candidate: kernels of a millisecond need no more, and there are hundreds."""


def jobs() -> int:
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0))))


def expected_s(shapes: list[RaceShape], *, with_liger: bool) -> float:
    """Seconds that `warm` should take."""
    widths = {(s.dim, s.hidden_dim) for s in shapes if s.activation == "swiglu"}
    builds = OUR_BUILDS * len(shapes) + (LIGER_BUILDS * len(widths) if with_liger else 0)
    start_s = 15.0
    return start_s + builds * SECONDS_PER_BUILD / jobs()


def warm(shapes: list[RaceShape], *, limit_s: float) -> float:
    """Run this module once per core and wait for all, at most limit_s; give the seconds taken.

    What is not compiled by then is compiled in the race.
    """
    began, count = time.monotonic(), jobs()
    names = [shape.name for shape in shapes]
    command = [sys.executable, "-m", "benchmarks.race_warm", "--of", str(count)]
    running = [
        subprocess.Popen([*command, "--part", str(part), "--shapes", *names])
        for part in range(count)
    ]
    for process in running:
        try:
            process.wait(max(0.1, limit_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return time.monotonic() - began


def our_launches(shape: RaceShape, arch: str, *, training: bool) -> list[Any]:
    """What our layer's experts launch for a shape, recorded without running anything."""
    from tests.support.experts_builds import step_launches

    sizes = (shape.num_tokens, shape.dim, shape.hidden_dim, shape.num_experts, shape.top_k)
    found = step_launches(arch, torch.bfloat16, shape=sizes, activation=shape.activation)
    if training:
        return found
    forward = step_launches(
        arch, torch.bfloat16, shape=sizes, activation=shape.activation, recompute_h=True
    )
    return forward[:4]  # a step without gradients stores no H: table, up, rows, sum


def compile_ours(shapes: list[RaceShape], arch: str, part: int, of: int) -> int:
    """Compile every of-th launch the way a launch would; gives their number."""
    launches: dict[str, Any] = {}
    for shape in shapes:
        for launch in our_launches(shape, arch, training=True):
            launches.setdefault(launch.key, launch)
    for shape in decode_shapes():
        for launch in our_launches(shape, arch, training=False):
            launches.setdefault(launch.key, launch)
    mine = list(launches.values())[part::of]
    for launch in mine:
        launch.kernel.warmup(grid=launch.grid, **launch.values, **launch.options)
    return len(mine)


@contextmanager
def only_compiling(part: int, of: int) -> Iterator[None]:
    """Inside, autotuned kernels compile every of-th candidate and run none."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def compile_some(
        self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any
    ) -> None:
        for config in self.configs[part::of]:
            self.fn.warmup(*args, grid=grid, **options, **config.all_kwargs())

    Autotuner.run = compile_some
    try:
        yield
    finally:
        Autotuner.run = run


def compile_liger(shapes: list[RaceShape], part: int, of: int) -> None:
    """Compile candidates of Liger-Kernel's autotuner: they depend on D and F, not on T or E."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    E = 8
    for D, F, K in dict.fromkeys(
        (s.dim, s.hidden_dim, s.top_k) for s in shapes if s.activation == "swiglu"
    ):

        def leaf(*size: int) -> torch.Tensor:
            made = torch.zeros(*size, device="cuda", dtype=torch.bfloat16)
            return made.requires_grad_()

        x, w_in, w_out = leaf(256, D), leaf(E, 2 * F, D), leaf(E, D, F)
        ids = torch.arange(256 * K, device="cuda", dtype=torch.int32).view(256, K) % E
        weights = torch.full((256, K), 1.0 / K, device="cuda", requires_grad=True)
        with only_compiling(part, of):
            LigerFusedMoEFunction.apply(x, w_in, w_out, ids, weights).sum().backward()


def tune_quickly() -> None:
    """Let Liger-Kernel's autotuner measure each candidate for milliseconds instead of an eighth of a second."""
    if absent("liger_kernel"):
        return
    import triton
    from liger_kernel.ops import fused_moe_kernels
    from triton.runtime.autotuner import Autotuner

    warmup, rep = _QUICK_BENCH_MS
    for kernel in vars(fused_moe_kernels).values():
        if isinstance(kernel, Autotuner):
            kernel._do_bench = lambda call, quantiles: triton.testing.do_bench(
                call, warmup=warmup, rep=rep, quantiles=quantiles
            )


def main(shapes: tuple[str, ...] = (), part: int = 0, of: int = 1) -> None:
    """Compile one process' share.

    Args:
        shapes: names; none: all.
        part: which share, from 0.
        of: how many shares there are.
    """
    from expertmesh.kernels.tiles import architecture

    torch.set_num_threads(1)
    found = chosen(shapes)
    compile_ours(found, architecture(torch.device("cuda")), part, of)
    if absent("liger_kernel") is None:
        compile_liger(found, part, of)


if __name__ == "__main__":
    tyro.cli(main)
