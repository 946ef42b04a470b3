"""What the five calls consist of, in the order in which the parts say most, with the most seconds that each may
take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.race.parts import Part
from benchmarks.race.shapes import GOAL_SHAPES, SHAPES

ON_ANY_DEVICE = (
    "tests/kernels/test_row_kernels.py",
    "tests/kernels/test_topk_kernel.py",
    "tests/kernels/test_ops_triton.py",
    "tests/kernels/test_batch_invariant_kernels.py",
    "tests/kernels/test_quantized_kernels.py",
    "tests/kernels/test_triton_adapters.py",
    "tests/ops/experts/test_weighted_activation.py",
    "tests/ops/test_topk.py",
    "tests/ops/test_capacity.py",
)
"""Tests of kernels and operators that take a GPU where there is one, and the interpreter elsewhere."""
NARROW_FORMATS = ("int8", "int4", "fp8", "mxfp4", "nf4")
SWEPT = ("qwen3-8k", "fine-32k", "mixtral-8k", "olmoe-32k")
_DRY_SLOWER = 10.0
"""A dry run's limits are this many times as long: the interpreter on a busy machine."""
_SWEPT_GEMMS = ("up", "w_in_grad", "down", "hidden_grad", "input_grad", "w_out_grad")


@dataclass(frozen=True)
class Setting:
    """How a call is run.

    Attributes:
        device: cuda or cpu.
        dry: tiny sizes, one round, the interpreter: everything runs, the numbers mean nothing.
        sanitize: with compute-sanitizer.
        shapes: names to which shapes are limited; none: all of the call.
        peers: names to which peers are limited; none: all.
    """

    device: str = "cuda"
    dry: bool = False
    sanitize: bool = False
    shapes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    def among(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The call's shapes that are wanted; a shape that is asked for and not the call's own comes last."""
        if not self.shapes:
            return names[:1] if self.dry else names
        return (
            *(n for n in names if n in self.shapes),
            *(n for n in self.shapes if n not in names),
        )

    def part(self, name: str, run: str, limit_s: float, *, attempts: int = 1, **more: Any) -> Part:
        """A part of a function that takes a device and whether the sizes are tiny."""
        arguments: dict[str, Any] = {"device": self.device, "tiny": self.dry} | more
        if self.dry:
            limit_s *= _DRY_SLOWER
            arguments |= {"rounds": 1} if "rounds" in more else {}
        return Part(name, f"benchmarks.race.{run}", limit_s, arguments, attempts)


def kernels(s: Setting) -> list[Part]:
    """Call (a): ceilings, the tests that matter, the table of kernels."""
    shapes = s.among(GOAL_SHAPES)
    first = ["tests/kernels/test_gpu_moe_kernels.py"]
    others = ["tests/kernels/test_gpu_routing_kernels.py", "tests/parallel/test_offload_gpu.py"]
    others += ON_ANY_DEVICE
    if s.dry:
        first, others = ["tests/kernels/test_tiles.py"], ["tests/benchmarks/race/test_model.py"]
    marks = None if s.dry else "not exhaustive"
    found = [
        s.part("machine", "measures:machine", 40, rounds=15),
        s.part("builds", "warm:builds", 90, shapes=shapes, tests=True),
        s.part("tests of the experts", "tests:run", 120, paths=first, marks=marks),
        *(s.part(f"kernels {n}", "kernels:table", 45, shape=n, rounds=15) for n in shapes),
        s.part("tests of the rest", "tests:run", 150, paths=others, marks=marks),
        s.part("properties", "properties:properties", 60),
    ]
    if s.sanitize:
        found += [
            Part(f"sanitizer {tool}", "benchmarks.race.kernels:sanitize", 150, {"tool": tool, "device": s.device})
            for tool in (("racecheck",) if s.dry else ("memcheck", "racecheck"))
        ]  # fmt: skip
    return found


def sweep(s: Setting) -> list[Part]:
    """Call (b): builds of all candidates, then every GEMM alone, shape by shape."""
    shapes = s.among(SWEPT)
    return [
        s.part("machine", "measures:machine", 40, rounds=5),
        s.part("builds", "sweep:builds", 180, shapes=shapes),
        *(
            s.part(f"sweep {n} {gemm}", "sweep:sweep", 40, attempts=3, shape=n, gemm=gemm, rounds=11)
            for n in shapes
            for gemm in _SWEPT_GEMMS
        ),
    ]  # fmt: skip


def peers(s: Setting) -> list[Part]:
    """Call (c): the race with peers, and what else has a line to hold."""
    shapes = s.among(tuple(shape.name for shape in SHAPES))
    if s.dry and not s.shapes:
        shapes = ("qwen3-8k", "blog-e16")

    def race(name: str) -> Part:
        return s.part(
            f"layers {name}", "layers:race_shape", 75, attempts=5, shape=name, rounds=11, peers=list(s.peers)
        )  # fmt: skip

    smaller = [
        s.part("metadata", "measures:metadata", 25, rounds=15),
        s.part("decode", "measures:decode", 45, rounds=40),
        s.part("skew", "measures:skew", 30, rounds=9),
    ]
    return [
        s.part("machine", "measures:machine", 40, rounds=9),
        s.part("builds", "warm:builds", 150, shapes=shapes, liger=True),
        *(race(name) for name in shapes[:2]),
        *smaller,
        *(race(name) for name in shapes[2:]),
        s.part("training", "train:speed_part", 90),
    ]


def engine(s: Setting) -> list[Part]:
    """Call (d): steps of the engine beside vLLM's, after the tests of what they are made of, and the layer race of the
    goals."""
    shapes = s.among(GOAL_SHAPES[:2])
    tests = ["tests/engine/test_captured_gpu.py", "tests/kernels/test_paged_attention_kernels.py"]
    tests.append("tests/ops/test_paged_attention.py")
    if s.dry:
        tests = ["tests/kernels/test_tiles.py"]
    return [
        s.part("machine", "measures:machine", 40, rounds=5),
        s.part("tests of the engine", "tests:run", 150, paths=tests, marks=None if s.dry else "not exhaustive"),
        s.part("engine steps", "engine_steps:steps", 240, rounds=3),
        *(
            s.part(f"layers {n}", "layers:race_shape", 75, attempts=2, shape=n, rounds=7, peers=list(s.peers))
            for n in shapes
        ),
    ]  # fmt: skip


def workloads(s: Setting) -> list[Part]:
    """Call (e): what users run: adapters beside peft, exact reinforcement learning, narrow, exact and paged experts."""
    return [
        s.part("machine", "measures:machine", 40, rounds=5),
        s.part("builds", "warm:builds", 90, shapes=SWEPT[:1]),
        s.part("lora step", "workloads:lora", 200),
        s.part("exact RL bfloat16", "workloads:exact_rl", 120, dtype="bfloat16"),
        *(s.part(f"formats {n}", "formats:quantized", 60, format=n, rounds=15) for n in NARROW_FORMATS),
        s.part("deterministic layer", "formats:deterministic", 45, rounds=15),
        s.part("paged experts", "workloads:paged", 120),
        s.part("full step", "workloads:full", 50),
        s.part("exact RL float32", "workloads:exact_rl", 90, dtype="float32"),
    ]


def plan(call: str, s: Setting) -> tuple[list[Part], float]:
    """The parts of a call and the seconds that all may take together.

    Raises:
        KeyError: there is no such call.
    """
    parts, budget_s = CALLS[call]
    return parts(s), budget_s * (_DRY_SLOWER if s.dry else 1.0)


CALLS: dict[str, tuple[Callable[[Setting], list[Part]], float]] = {
    "kernels": (kernels, 480.0),
    "sweep": (sweep, 450.0),
    "peers": (peers, 570.0),
    "engine": (engine, 540.0),
    "workloads": (workloads, 480.0),
}
"""By name: the parts, and the seconds of the whole call; 42 minutes in all."""
