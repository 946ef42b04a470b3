"""The layer against the layers of others and against plain matrix products of the same FLOPs.

    python -m benchmarks.layer                                # training shapes and decoding, all threads, wall time
    python -m benchmarks.layer --threads 1 --clock cpu        # the same where other work shares the machine
    python -m benchmarks.layer --device cuda --dim 2048 --hidden-dim 1024 --tokens 16384 --no-einsum

Contenders per shape, all with the same weights and a new batch (so a new routing) in every round:

* expertmesh: `MoELayer`, router included.
* transformers: `MixtralSparseMoeBlock`, router included, by `experts_implementation`: eager, grouped_mm and, where its
  copy of the weights fits (decoding), batched_mm.
* Liger-Kernel's fused MoE, SonicMoE, ScatterMoE and Tutel (on a GPU) and DeepSpeed's `MoE` (GELU experts), where
  installed.
* torch grouped_mm: `torch.nn.functional.grouped_mm` over sorted rows; one-hot cumsum: rows placed by a running count.
* einsum: the GShard/fairseq form, one-hot dispatch and combine tensors (T, E, C), with C the fullest expert's rows.
* matrix products: forward, input and weight gradients of all T * K rows at once with one expert's weights; no MoE can
  be faster than about this. Its time is 1.0 in the column "of products".
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmarks.harness import (
    Clock,
    Contender,
    Timing,
    checked,
    circumstances,
    interleaved,
    previous_rows,
    write_report,
)
from benchmarks.layer_peers import Case, EinsumMoE, make_layer, peers_of
from benchmarks.race.adapters import OWN_ROUTER
from benchmarks.race.peers import versions
from tests.oracle.numerics import assert_two_times
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUM_BATCHES = 7
OTHER_BYTES = 1 << 27
"""Other memory written before each decoding call, so that no contender finds weights that another left in the cache."""
FAR_OFF = 0.05
"""A peer whose results are further off than this, relatively, computes something else."""
NOTE = (
    "Median of interleaved rounds, gradients set to None before each, a new batch and so a new routing in every round; "
    "router included. `of products`: time relative to plain matrix products of the same FLOPs. Contenders with one "
    "round are the slow baselines. In decoding (forward) all use the same weights, none of them in a cache."
)


def as_contender(
    name: str,
    module: nn.Module,
    call: Callable[[Tensor], Tensor],
    case: Case,
    *,
    slow: bool = False,
) -> Contender:
    """Time forward and backward (or forward alone) of a module on a new batch per round."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(case.num_tokens, case.dim, generator=generator).to(case.device, case.dtype)
        for _ in range(NUM_BATCHES)
    ]
    grad = torch.randn(case.num_tokens, case.dim, generator=generator).to(case.device, case.dtype)
    now = {"x": batches[0]}
    decodes = not case.training and case.device == "cpu"
    other = torch.zeros(OTHER_BYTES // 4 if decodes else 0)

    def prepare(number: int) -> None:
        other.add_(1)
        module.zero_grad(set_to_none=True)
        now["x"] = batches[number % NUM_BATCHES].detach().requires_grad_(case.training)

    def step() -> None:
        call(now["x"]).backward(grad)

    def forward_only() -> None:
        with torch.no_grad():
            call(now["x"])

    return Contender(name, step if case.training else forward_only, prepare, slow)


def products(case: Case) -> Contender:
    """The same FLOPs as matrix products over all rows with one expert's weights."""
    rows, hidden = case.num_tokens * case.top_k, case.num_branches * case.hidden_dim

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=case.device).to(case.dtype)

    x, d_y, h, a = (randn(rows, width) for width in (case.dim, case.dim, hidden, case.hidden_dim))
    w_in, w_out = randn(hidden, case.dim), randn(case.dim, case.hidden_dim)

    def forward() -> None:
        torch.mm(x, w_in.T)
        torch.mm(a, w_out.T)

    def step() -> None:
        forward()
        torch.mm(d_y, w_out)
        torch.mm(d_y.T, a)
        torch.mm(h, w_in)
        torch.mm(h.T, x)

    return Contender("matrix products", step if case.training else forward)


def contenders(case: Case, *, einsum: bool = True) -> tuple[list[Contender], list[str]]:
    """All that can run this case here, ours first, and a line for each that cannot."""
    layer = make_layer(case).train(case.training)
    found, missing = [as_contender("expertmesh", layer, lambda x: layer(x)[0], case)], []
    for peer in peers_of(case, einsum=einsum):
        if peer.missing is not None:
            missing.append(f"{peer.name}: {peer.missing}")
            continue
        module = peer.make(layer, case).train(case.training)
        if not case.training:
            # the very tensors: where in memory weights lie makes 8 % when they are read once
            own = layer.experts
            module.take(layer.router.proj.weight, own.w_in.flatten(1, 2), own.w_out)
        found.append(as_contender(peer.name, module, module, case, slow=peer.slow))
    return [*found, products(case)], missing


def check(case: Case, *, make: Callable[[Case], nn.Module] = make_layer) -> None:
    """Compare ours, as `make` makes it, with others' in this precision and in FP64, at a smaller size.

    Raises:
        AssertionError: ours breaks the two-times rule, or a rival computes something else.
    """
    small = replace(case, num_tokens=48, dim=64, hidden_dim=96, training=True)
    layer = make(small)
    exact_case = replace(small, dtype=torch.float64)
    x, grad = (torch.randn(48, 64).to(case.device, torch.bfloat16) for _ in range(2))

    def results(
        module: nn.Module,
        router: nn.Parameter,
        weight_grads: Callable[[], tuple[Tensor, Tensor]],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        y = module(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(grad.to(dtype))
        return [y.detach(), leaf.grad, router.grad, *(g.flatten() for g in weight_grads())]

    own = layer.experts
    ours = results(layer, layer.router.proj.weight, lambda: (own.w_in.grad, own.w_out.grad), small.dtype)
    exact = EinsumMoE(layer, exact_case).double()
    oracle = results(exact, exact.router, exact.weight_grads, torch.float64)
    for peer in peers_of(small, einsum=True):
        if peer.missing is None and peer.make not in OWN_ROUTER:  # those: `benchmarks.race`
            module = peer.make(layer, small)
            theirs = results(module, module.router, module.weight_grads, small.dtype)
            compare(ours, theirs, oracle, small, peer.name)


def compare(ours: list[Tensor], theirs: list[Tensor], oracle: list[Tensor], case: Case, peer: str) -> None:
    """Ours is at most twice as far from the truth as a peer, and the peer computes the same at all.

    Raises:
        AssertionError: one of the two does not hold.
    """
    names = ("y", "x gradient", "router gradient", "w_in gradient", "w_out gradient")
    about = f"({case.activation}, {case.dtype}, beside {peer})"
    for name, a, b, c in zip(names, ours, theirs, oracle, strict=True):
        distance = (b.double() - c).norm() / c.norm()
        assert distance < FAR_OFF, f"{name} of {peer} is off by {distance:.3f} {about}"
        assert_two_times(a, b.to(a.dtype), c, what=f"{name} {about}", dtype=case.dtype)


def rows_of(case: Case, timings: list[Timing]) -> list[dict[str, Any]]:
    """Give table rows of one case."""
    by_name = {timing.name: timing for timing in timings}
    base = by_name["matrix products"].median_s
    ours = by_name["expertmesh"].median_s
    return [
        {
            "tokens": case.num_tokens,
            "E": case.num_experts,
            "K": case.top_k,
            "activation": case.activation,
            "dtype": str(case.dtype).removeprefix("torch."),
            "pass": "forward+backward" if case.training else "forward",
            "contender": timing.name,
            "median ms": timing.median_s * 1e3,
            "of products": timing.median_s / base,
            "expertmesh is faster by": timing.median_s / ours,
            "rounds": timing.rounds,
        }
        for timing in timings
    ]


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace the rows of the new rows' case, and order all by case."""
    keys = ("pass", "E", "K", "activation", "dtype", "tokens")

    def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in keys)

    kept = [row for row in old if case_of(row) != case_of(new[0])]
    order = {
        "forward+backward": 0,
        "forward": 1,
        "swiglu": 0,
        "gelu": 1,
        "float32": 0,
        "bfloat16": 1,
    }
    return sorted([*kept, *new], key=lambda row: [order.get(value, value) for value in case_of(row)])


def absent_note(left_out: set[str]) -> str:
    """Say which peers are not in the table, and why."""
    return "Not in the table: " + ("; ".join(sorted(left_out)) or "none") + "."


def main(
    threads: int = 0,
    clock: Clock = "wall",
    rounds: int = 5,
    dim: int = 512,
    hidden_dim: int = 1024,
    tokens: int = 4096,
    shapes: tuple[str, ...] = ("16x2", "64x8"),
    activations: tuple[str, ...] = ("swiglu", "gelu"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    decode: tuple[int, ...] = (1, 8, 32),
    einsum: bool = True,
    update: bool = False,
    device: str = "cpu",
    name: str | None = None,
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write.

    Args:
        threads: of PyTorch; 0: its default.
        clock: wall, or cpu (one thread's CPU time); on a GPU events measure.
        rounds: timed rounds of training shapes.
        dim: D.
        hidden_dim: F.
        tokens: T of training shapes.
        shapes: ExK of training shapes.
        activations: swiglu, gelu.
        dtypes: float32, bfloat16.
        decode: T of decoding shapes (E=64, K=8); none: leave out.
        einsum: include the einsum baseline.
        update: keep the rows of other cases in the result files, if they come from the same circumstances.
        device: cpu or cuda.
        name: of the result files; none: layer_DEVICE_202611.
        out: folder of the result files.
    """
    if threads:
        torch.set_num_threads(threads)
    clock = "cuda" if device == "cuda" else clock
    name = name or f"layer_{device}_202611"
    around = circumstances(clock=clock, peers=versions())
    cases = [
        Case(
            num_tokens=tokens,
            dim=dim,
            hidden_dim=hidden_dim,
            num_experts=int(shape.split("x")[0]),
            top_k=int(shape.split("x")[1]),
            activation=activation,
            dtype=DTYPES[dtype],
            device=device,
        )
        for shape in shapes
        for activation in activations
        for dtype in dtypes
    ]
    cases += [
        Case(t, dim, hidden_dim, 64, 8, "swiglu", DTYPES[dtype], False, device) for t in decode for dtype in dtypes
    ]
    table: list[dict[str, Any]] = []
    left_out: set[str] = set()
    for case in cases:
        torch.manual_seed(0)
        checked("layer", lambda case=case: check(case))
        found, missing = contenders(case, einsum=einsum)
        left_out |= set(missing)
        many = rounds if case.training else rounds * 4
        new = rows_of(case, interleaved(found, rounds=many, clock=clock))
        table = merged(previous_rows(out / name, around) if update else table, new)
        write_report(
            out / name,
            title=f"The layer on the {'GPU' if device == 'cuda' else 'CPU'} (D={dim}, F={hidden_dim})",
            command=f"python -m benchmarks.layer --device {device} --threads {torch.get_num_threads()} "
            f"--clock {clock} --rounds {rounds}",
            notes=[NOTE, absent_note(left_out)],
            around=around,
            rows=table,
        )


if __name__ == "__main__":
    tyro.cli(main)
