"""Compile before anything is timed, in as many processes as there are cores: Triton alone takes minutes, one kernel
after another.

Fills Triton's cache on disk for our kernels and for Liger-Kernel's, whose autotuner tries about 240 builds per width of
the layer. Nothing is timed here and no result is kept: a process takes every n-th build.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.peer_parts import absent
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import RaceShape, chosen, decode_shapes

MOST_JOBS = 16
DRY_TARGET, DRY_KERNEL = "sm_90", "sum_rows"
"""In a dry run one kernel is built ahead of time, since Triton compiles for a GPU that is here only otherwise."""
_QUICK_BENCH_MS = (5, 20)
"""Warm-up and repetitions of one autotuning candidate: kernels of a millisecond need no more, and there are
hundreds."""


def jobs() -> int:
    """Processes to compile in."""
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0))))


def shared_out(share: Callable[[int, int], object], count: int) -> int:
    """Run share(part, count) for each part in a forked process; give how many failed.

    Raises:
        RuntimeError: this process has touched a GPU, which its forks then cannot use.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("builds cannot be shared out: this process has used the GPU already")
    processes = []
    for part in range(count):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                share(part, count)
                code = 0
            except BaseException:  # the other shares go on
                traceback.print_exc()
            finally:
                os._exit(code)
        processes.append(process)
    return sum(os.waitpid(process, 0)[1] != 0 for process in processes)


def builds(
    keep: Keep,
    *,
    shapes: Sequence[str],
    device: str,
    tiny: bool = False,
    liger: bool = False,
    tests: bool = False,
) -> dict[str, Any]:
    """A part: compile what these shapes and decoding launch, and what Liger-Kernel's autotuner tries for them.

    Args:
        keep: of the part.
        shapes: names.
        device: cuda, or cpu with tiny.
        tiny: one build of one kernel only.
        liger: with Liger-Kernel's candidates.
        tests: with what the experts' GPU tests launch, whose workers would all compile the same at once.
    """
    found, began = chosen(tuple(shapes)), time.monotonic()
    arch, result = from_outside(), dict[str, Any](processes=jobs())
    launches = ours_of(found[: 1 if tiny else None], arch)
    if tests and not tiny:
        from tests.support.experts_builds import gpu_launches

        known = {launch.key for launch in launches}
        launches += [launch for launch in gpu_launches(arch) if launch.key not in known]

    def ours(part: int, of: int) -> None:
        compile_launches(launches, device, part, of, tiny=tiny)

    result["failed"] = shared_out(ours, result["processes"])
    result["seconds"] = time.monotonic() - began
    keep(result)
    if liger and not tiny and absent("liger_kernel") is None:
        failed = shared_out(lambda part, of: compile_liger(found, part, of), result["processes"])
        result |= {"failed, Liger-Kernel": failed, "seconds": time.monotonic() - began}
    return result


def ours_of(shapes: Sequence[RaceShape], arch: str) -> list[Any]:
    """What router and experts launch for these shapes in training, and experts for decoding, each build once."""
    from tests.support.experts_builds import router_launches

    launches: dict[str, Any] = {}
    for shape in shapes:
        sizes = (shape.num_tokens, shape.dim, shape.num_experts)
        for launch in (*our_launches(shape, arch, training=True), *router_launches(arch, sizes)):
            launches.setdefault(launch.key, launch)
    for shape in decode_shapes():
        for launch in our_launches(shape, arch, training=False):
            launches.setdefault(launch.key, launch)
    return list(launches.values())


def here() -> str:
    """The GPU's name in the tables of tiles; that of a dry run where there is none."""
    from expertmesh.kernels.tiles import architecture

    return architecture(torch.device("cuda")) if torch.cuda.is_available() else DRY_TARGET


def from_outside(ask: Callable[[], str] = here) -> str:
    """What a process of its own answers: this one has then not touched a GPU, and its forks can."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writer, ask().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        answer = found.read()
    os.waitpid(process, 0)
    if not answer:
        raise RuntimeError("the process that asks for the GPU's name ended without one")
    return answer


def our_launches(shape: RaceShape, arch: str, *, training: bool) -> list[Any]:
    """What our layer's experts launch for a shape, recorded without running anything."""
    from tests.support.experts_builds import step_launches

    sizes = (shape.num_tokens, shape.dim, shape.hidden_dim, shape.num_experts, shape.top_k)
    found = step_launches(arch, torch.bfloat16, shape=sizes, activation=shape.activation)
    if training:
        return found
    forward = step_launches(arch, torch.bfloat16, shape=sizes, activation=shape.activation, recompute_h=True)
    return forward[:4]  # a step without gradients stores no H: table, up, rows, sum


def compile_launches(launches: Sequence[Any], device: str, part: int, of: int, *, tiny: bool = False) -> int:
    """Compile every of-th launch the way a launch would; gives their number."""
    if tiny:
        launches = [launch for launch in launches if launch.name == DRY_KERNEL][:1]
    mine = list(launches)[part::of]
    for launch in mine:
        if device.startswith("cuda"):
            launch.kernel.warmup(grid=launch.grid, **launch.values, **launch.options)
        else:
            launch.build(DRY_TARGET)
    return len(mine)


@contextmanager
def only_compiling(part: int, of: int) -> Iterator[None]:
    """Inside, autotuned kernels compile every of-th candidate and run none."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def compile_some(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        for config in self.configs[part::of]:
            self.fn.warmup(*args, grid=grid, **options, **config.all_kwargs())

    Autotuner.run = compile_some
    try:
        yield
    finally:
        Autotuner.run = run


def compile_liger(shapes: Sequence[RaceShape], part: int, of: int) -> None:
    """Compile candidates of Liger-Kernel's autotuner: they depend on D and F, not on T or E."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    E = 8
    for D, F, K in dict.fromkeys((s.dim, s.hidden_dim, s.top_k) for s in shapes if s.activation == "swiglu"):

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
    from triton.runtime.autotuner import Autotuner

    try:
        from liger_kernel.ops import fused_moe_kernels
    except Exception:  # whatever a foreign package raises: the race says why it is missing
        return
    warmup, rep = _QUICK_BENCH_MS
    for kernel in vars(fused_moe_kernels).values():
        if isinstance(kernel, Autotuner):
            kernel._do_bench = lambda call, quantiles: triton.testing.do_bench(
                call, warmup=warmup, rep=rep, quantiles=quantiles
            )
