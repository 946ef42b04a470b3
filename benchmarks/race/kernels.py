"""The table of kernels: each launch of a step on its own, predicted beside measured, router and combine included."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from benchmarks.clock import Entry, Sample, Stopwatch, interleaved
from benchmarks.race.check import check
from benchmarks.race.contenders import Inputs, Racer, WeightSet, ours
from benchmarks.race.layers import entries, release
from benchmarks.race.parts import Keep
from benchmarks.race.shapes import RaceShape, chosen
from torch import Tensor, nn

import expertmesh.kernels
from benchmarks.race import model
from expertmesh.functional import moe_mlp, route_metadata

ROLES = {
    ("forward", "up", 0): "up",
    ("forward", "rows", 0): "down",
    ("forward", "sum_rows", 0): "combine",
    ("backward", "hidden_grad", 0): "hidden_grad",
    ("backward", "rows", 0): "input_grad",
    ("backward", "sum_rows", 0): "input_combine",
    ("backward", "rows_transposed", 0): "w_out_grad",
    ("backward", "rows_transposed", 1): "w_in_grad",
}
"""What the launches of a step are for: by pass, kernel, and how often that kernel came before in this pass."""
_PROFILED = 40


@dataclass(frozen=True)
class Launched:
    """One launch of a step.

    Attributes:
        pass_: forward or backward.
        kernel: name of the `@triton.jit` function without its underscore.
        number: launches of this kernel before it in its pass.
        run: launches it again with the same arguments; gives what Triton compiled, on a GPU.
    """

    pass_: str
    kernel: str
    number: int
    run: Callable[[], Any]

    @property
    def role(self) -> str:
        """Its name in the model, or pass and kernel where the model has none."""
        known = ROLES.get((self.pass_, self.kernel, self.number))
        return known or f"{self.pass_} {self.kernel}" + (f" {self.number + 1}" * bool(self.number))


@contextmanager
def watched(
    into: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]],
) -> Iterator[None]:
    """Inside, every launch of our kernels runs and is written down: kernel, grid, arguments, options."""
    with ExitStack() as stack:
        for found in pkgutil.iter_modules(expertmesh.kernels.__path__):
            module = importlib.import_module(f"expertmesh.kernels.{found.name}")
            launch = getattr(module, "launch", None)
            if not callable(launch):
                continue

            def write_down(
                kernel: Any,
                grid: tuple[int, ...],
                *args: Any,
                _launch: Any = launch,
                **options: Any,
            ) -> None:
                _launch(kernel, grid, *args, **options)
                if 0 not in grid:
                    into.append((kernel, grid, args, options))

            stack.enter_context(mock.patch.object(module, "launch", write_down))
        yield


def _again(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type == "cpu":
        from expertmesh.kernels.interpret import interpret

        return interpret(kernel, grid, args, options)
    return kernel[grid](*args, **options)


def launches_of(experts: "Experts") -> list[Launched]:
    """Run the experts forward and backward once and give their launches."""
    found = []
    for pass_, run in (("forward", experts.forward), ("backward", experts.backward)):
        raw: list[Any] = []
        with watched(raw):
            run()
        seen: dict[str, int] = {}
        for call in raw:
            name = call[0].__name__.lstrip("_")
            number = seen.get(name, 0)
            seen[name] = number + 1
            found.append(Launched(pass_, name, number, lambda call=call: _again(*call)))
    return found


class Experts:
    """The experts' operator on fixed tensors, by the Triton kernels."""

    def __init__(self, shape: RaceShape, weights: WeightSet, x_TD: Tensor, grad_TD: Tensor, ids_TK: Tensor) -> None:
        self.shape, self.grad_TD, self.ids_TK = shape, grad_TD, ids_TK
        self.leaves = [t.detach().requires_grad_() for t in (x_TD, weights.w_in_EGFD, weights.w_out_EDF)]
        even = torch.full(ids_TK.shape, 1.0 / shape.top_k, device=x_TD.device)
        self.leaves.append(even.requires_grad_())
        self.maps = route_metadata(ids_TK, shape.num_experts, backend="triton")

    def forward(self) -> None:
        x, w_in, w_out, weights = self.leaves
        self.y_TD = moe_mlp(x, w_in, w_out, weights, self.maps, activation=self.shape.activation, backend="triton")

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.y_TD, self.leaves, self.grad_TD)


class _RouterAlone(nn.Module):
    """Takes the experts' place: hands the tokens back and keeps the routing weights."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, **_: Any) -> Tensor:
        self.weights_TK = weights_TK
        return x_TD


def _router(shape: RaceShape, device: str, weights: WeightSet, inputs: Inputs, backend: str) -> Entry:
    """Everything of the layer before its experts, forward and backward."""
    racer = ours(shape, device=device, backend=backend)
    racer.take(weights)
    layer, alone = racer.module, _RouterAlone()
    layer.experts = alone
    layer.train()
    grad_TK = torch.randn(shape.num_tokens, shape.top_k, device=device)
    now: dict[str, Tensor] = {}

    def prepare(number: int) -> None:
        layer.zero_grad(set_to_none=True)
        now["x"] = inputs.batches[number % len(inputs.batches)].detach().requires_grad_()

    return Entry(
        "router",
        prepare,
        {
            "router": lambda: layer(now["x"]),
            "router_grad": lambda: alone.weights_TK.backward(grad_TK.to(alone.weights_TK.dtype)),
        },
    )


def table(keep: Keep, *, shape: str, device: str, tiny: bool = False, rounds: int = 15) -> dict[str, Any]:
    """A part: the kernels of one shape, one by one, each with a cold L2.

    Args:
        keep: of the part.
        shape: its name.
        device: cuda, or cpu with tiny (the interpreter).
        tiny: sizes that the interpreter runs in seconds; the numbers then mean nothing.
        rounds: timed rounds.

    Returns:
        {"kernels": rows, "step": the whole layer's milliseconds, "check": what the comparison with FP64 said,
        "profile": device time by kernel of one step as torch.profiler sees it}.
    """
    (sizes,) = chosen((shape,))
    sizes = sizes.smallest() if tiny else sizes
    warmup, steps = (0, 1) if tiny else (2, 3)
    backend = "triton" if device == "cpu" else "auto"
    generator = torch.Generator(device).manual_seed(0)
    weights = WeightSet.draw(sizes, device, generator)
    inputs = Inputs.draw(sizes, device, generator, 2)
    racer = ours(sizes, device=device, backend=backend)
    racer.module.train()
    found: dict[str, Any] = {"check": checked(sizes, racer, weights, inputs, generator)}
    keep(found)
    stopwatch = Stopwatch(device)
    racer.take(weights)
    ids_TK = racer.expert_ids(inputs.batches[0])
    experts = Experts(sizes, weights, inputs.batches[0], inputs.grad_TD, ids_TK)
    launched = launches_of(experts)
    compiled = {one.role: resources(one.run()) for one in launched}
    phases = [Entry(one.role, id, {one.role: one.run}) for one in launched]
    maps = lambda: route_metadata(ids_TK, sizes.num_experts, backend="triton")  # noqa: E731
    phases += [_router(sizes, device, weights, inputs, backend), Entry("maps", id, {"maps": maps})]
    timed = interleaved(phases, stopwatch, rounds=rounds, warmup=warmup)
    samples = {part: sample for by_part in timed.values() for part, sample in by_part.items()}
    found["kernels"] = [row(sizes, name, samples[name], compiled.get(name, {})) for name in in_order(samples)]
    keep(found)
    del experts, launched, phases
    release(device)
    whole = interleaved(entries(racer, [weights], inputs), stopwatch, rounds=rounds, warmup=warmup)
    found["step"] = {phase: sample.median_s * 1e3 for by_phase in whole.values() for phase, sample in by_phase.items()}
    keep(found)
    found["profile"] = profiled(lambda: entries(racer, [weights], inputs)[1], stopwatch, steps)
    return found


def checked(shape: RaceShape, racer: Racer, weights: WeightSet, inputs: Inputs, generator: torch.Generator) -> str:
    """Whether the layer is right at this size; a wrong one is timed all the same, and said to be wrong."""
    try:
        off = check(shape, racer, weights, inputs.batches[0], inputs.grad_TD, generator)
        return f"right, off by {off:.1e}"
    except AssertionError as error:
        return f"WRONG: {str(error)[:300]}"


def in_order(samples: dict[str, Sample]) -> list[str]:
    """The model's kernels in their order, then all others."""
    known = [name for name in model.KERNELS if name in samples]
    return [*known, *(name for name in samples if name not in known)]


def row(shape: RaceShape, name: str, sample: Sample, compiled: dict[str, int]) -> dict[str, Any]:
    """A kernel's line."""
    seconds = sample.median_s
    found: dict[str, Any] = {"kernel": name, "us": seconds * 1e6, "spread": sample.spread}
    if name in model.KERNELS:
        work, expected = model.work(shape, name), model.predicted(shape, name)
        found |= {
            "predicted us": expected.microseconds,
            "measured / predicted": seconds * 1e6 / expected.microseconds,
            "TFLOP/s": work.flops / seconds / 1e12,
            "GB/s": work.num_bytes / seconds / 1e9,
            "prediction": expected.source,
        }
    return found | compiled


def resources(compiled: Any) -> dict[str, int]:
    """Registers, spilled registers and bytes of shared memory of what Triton compiled; nothing in the interpreter."""
    if compiled is None:
        return {}
    shared = getattr(getattr(compiled, "metadata", None), "shared", None)
    found = {
        "registers": getattr(compiled, "n_regs", None),
        "spills": getattr(compiled, "n_spills", None),
    }
    return {name: value for name, value in (*found.items(), ("shared", shared)) if value is not None}


def profiled(step: Callable[[], Entry], stopwatch: Stopwatch, steps: int) -> list[dict[str, Any]]:
    """Device time (on a CPU its own) by kernel of forward and backward as torch.profiler has it, per step, the largest
    first.

    It counts what the table may not know: casts, copies, fills. The L2 is warm here.
    """
    from torch.profiler import ProfilerActivity, profile

    entry = step()
    (run,) = entry.parts.values()
    kinds = [ProfilerActivity.CUDA] if stopwatch.is_cuda else [ProfilerActivity.CPU]
    entry.prepare(0)
    run()
    stopwatch.wait()
    with profile(activities=kinds) as seen:
        for number in range(steps):
            entry.prepare(number)
            run()
        stopwatch.wait()
    entry.finish()
    times = [
        (
            e.key,
            (e.self_device_time_total if stopwatch.is_cuda else e.self_cpu_time_total) / steps,
            e.count / steps,
        )
        for e in seen.key_averages()
    ]
    times.sort(key=lambda t: -t[1])
    return [{"kernel": name[:120], "us": us, "count": n} for name, us, n in times[:_PROFILED] if us]


SANITIZER = "compute-sanitizer"


def sanitize(keep: Keep, *, tool: str, device: str, limit_s: float = 240.0) -> dict[str, Any]:
    """A part: a small step under compute-sanitizer.

    Args:
        keep: of the part.
        tool: memcheck or racecheck.
        device: of the step.
        limit_s: of its process.

    Returns:
        {"tool", "errors": its exit code or None where it is not installed, "last": its last lines}.

    Raises:
        AssertionError: it found errors.
    """
    program = shutil.which(SANITIZER)
    if program is None:
        return {"tool": tool, "errors": None, "last": f"no {SANITIZER} here"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m"]
    command += ["benchmarks.race.kernels", device]
    # without PyTorch's allocator every tensor has bounds of its own
    around = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(
        command,
        env=around,
        timeout=limit_s,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(ended.stdout)
    last = ended.stdout.strip().splitlines()[-5:]
    found = {"tool": tool, "errors": ended.returncode, "last": last}
    keep(found)
    assert ended.returncode == 0, f"{tool}: exit code {ended.returncode}: {' / '.join(last)}"
    return found


def small_step(device: str) -> None:
    """Forward and backward of a layer with odd numbers of rows, by the Triton kernels."""
    shape = replace(chosen(("qwen3-8k",))[0], num_tokens=300, dim=192, hidden_dim=160, num_experts=7, top_k=2)
    shape = replace(shape, num_tokens=20, dim=32, hidden_dim=48) if device == "cpu" else shape
    generator = torch.Generator(device).manual_seed(0)
    racer = ours(shape, device=device, backend="triton")
    racer.module.train()
    inputs = Inputs.draw(shape, device, generator, 1)
    racer.take(WeightSet.draw(shape, device, generator))
    racer(inputs.batches[0].requires_grad_()).backward(inputs.grad_TD)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    print("the step ended")


if __name__ == "__main__":
    small_step(sys.argv[1])
