"""The smaller parts of the race: the machine and its ceilings, maps alone, skewed routing, decoding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from benchmarks.clock import Entry, Stopwatch, interleaved
from benchmarks.harness import circumstances
from benchmarks.race.contenders import Inputs, WeightSet, ours
from benchmarks.race.layers import release
from benchmarks.race.parts import Keep
from benchmarks.race.peers import versions
from benchmarks.race.shapes import BYTES, SHAPES, RaceShape, decode_shapes
from benchmarks.routing_scaling import one_hot_cumsum
from torch import Tensor

from expertmesh.functional import route_metadata
from expertmesh.moe.types import Routing


def _entry(name: str, run: Callable[[], object], prepare: Callable[[int], object] = id) -> Entry:
    return Entry(name, prepare, {"run": run})


def surroundings(device: str) -> dict[str, Any]:
    """Circumstances, with the GPU told apart by its memory."""
    is_cuda = device.startswith("cuda")
    found = circumstances(clock="cuda" if is_cuda else "wall", peers=versions())
    found["gpu"] = "no GPU"
    if is_cuda:
        seen = torch.cuda.get_device_properties(device)
        memory = f"{seen.total_memory / 2**30:.0f} GiB"
        found["gpu"] = f"{seen.name}, {memory}, {seen.multi_processor_count} multiprocessors"
        found["versions"]["cuda"] = str(torch.version.cuda)
    return found


def machine(keep: Keep, *, device: str, tiny: bool = False, rounds: int = 15) -> dict[str, Any]:
    """A part: what runs here, bytes/s of a large copy (read plus written), FLOP/s of an 8192^3 product of random
    BF16."""
    found = surroundings(device)
    keep(found)
    return found | _ceilings(Stopwatch(device), device, tiny=tiny, rounds=rounds)


def _ceilings(stopwatch: Stopwatch, device: str, *, tiny: bool, rounds: int) -> dict[str, float]:
    size, num_bytes = (256, 1 << 20) if tiny else (8192, 4 << 30)
    source = torch.empty(num_bytes, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    found = interleaved(
        [
            _entry("copy", lambda: target.copy_(source)),
            _entry("product", lambda: torch.mm(a, b, out=out)),
        ],
        stopwatch,
        rounds=rounds,
        warmup=3,
    )
    return {
        "copy_bytes_per_s": 2 * num_bytes / found["copy"]["run"].median_s,
        "gemm_flops_per_s": 2 * size**3 / found["product"]["run"].median_s,
        "gemm_size": size,
    }


def copy_bytes_per_s(stopwatch: Stopwatch, device: str, *, tiny: bool) -> float:
    """The copy's rate alone, for parts that compare with it in their own run."""
    found: float = _ceilings(stopwatch, device, tiny=tiny, rounds=3)["copy_bytes_per_s"]
    return found


METADATA_CASES = ((65_536, 64, 2), (32_768, 128, 8), (65_536, 256, 8))
"""T, E, K; the first one carries the hard line."""


def metadata(keep: Keep, *, device: str, tiny: bool = False, rounds: int = 15) -> list[dict[str, Any]]:
    """A part: `route_metadata` against one-hot + cumsum, first checked for equal rows."""
    stopwatch, rows = Stopwatch(device), list[dict[str, Any]]()
    for T, E, K in METADATA_CASES:
        num_tokens = T // 256 if tiny else T
        ids_TK = torch.rand(num_tokens, E, device=device).topk(K).indices
        row_N, rows_E = one_hot_cumsum(ids_TK, E)
        maps = route_metadata(ids_TK, E)
        assert torch.equal(maps.row_of_slot_N.long(), row_N), "rows differ from one-hot + cumsum"
        assert torch.equal(maps.offsets_E.diff().long(), rows_E), "counts differ"
        found = interleaved(
            [
                _entry("ours", lambda ids=ids_TK, E=E: route_metadata(ids, E)),
                _entry("one-hot", lambda ids=ids_TK, E=E: one_hot_cumsum(ids, E)),
            ],
            stopwatch,
            rounds=rounds,
            warmup=2,
        )
        mine, theirs = found["ours"]["run"], found["one-hot"]["run"]
        rows.append(
            {
                "T": num_tokens,
                "E": E,
                "K": K,
                "route_metadata us": mine.median_s * 1e6,
                "host us": mine.host_median_s * 1e6,
                "one-hot + cumsum us": theirs.median_s * 1e6,
                "faster by": theirs.median_s / mine.median_s,
            }
        )
        keep(rows)
    return rows


def zipf_ids(shape: RaceShape, device: str, generator: torch.Generator, power: float) -> Tensor:
    """(T, K) distinct experts per token, expert e with weight 1 / (e + 1)^power; 0: balanced. By Gumbel numbers."""
    rank_E = torch.arange(1, shape.num_experts + 1, device=device, dtype=torch.float32)
    size = (shape.num_tokens, shape.num_experts)
    u_TE = torch.rand(size, device=device, generator=generator).clamp_min(1e-20)
    return (-power * rank_E.log() - (-u_TE.log()).log()).topk(shape.top_k).indices


SKEWED = ("qwen3-8k", "qwen3-32k", "olmoe-32k")


def skew(keep: Keep, *, device: str, tiny: bool = False, rounds: int = 15) -> list[dict[str, Any]]:
    """A part: forward + backward of ours with given choices, balanced, and skewed as 1 / rank."""
    rows = []
    for shape in SHAPES:
        if shape.name in SKEWED[: 1 if tiny else None]:
            sizes = shape.tiny() if tiny else shape
            rows.append(_skew(sizes, Stopwatch(device), device, rounds=rounds))
            keep(rows)
            release(device)
    return rows


def _skew(shape: RaceShape, stopwatch: Stopwatch, device: str, *, rounds: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    weights = WeightSet.draw(shape, device, generator)
    inputs = Inputs.draw(shape, device, generator, 2)
    racer = ours(shape, device=device)
    racer.module.train()
    rows, entries = {}, []
    for name, power in (("balanced", 0.0), ("zipf", 1.0)):
        ids_TK = zipf_ids(shape, device, generator, power)
        rows[name] = int(ids_TK.flatten().bincount(minlength=shape.num_experts).max())
        now: dict[str, Tensor] = {}

        def prepare(number: int, now: dict[str, Tensor] = now) -> None:
            racer.take(weights)
            now["x"] = inputs.batches[number % 2].detach().requires_grad_()

        def step(now: dict[str, Tensor] = now, ids: Tensor = ids_TK) -> None:
            y, _ = racer.module(now["x"], routing=Routing(ids))
            y.backward(inputs.grad_TD)

        entries.append(Entry(name, prepare, {"both": step}, lambda: racer.take(weights)))
    found = interleaved(entries, stopwatch, rounds=rounds, warmup=3)
    balanced, skewed = (found[name]["both"].median_s for name in ("balanced", "zipf"))
    return {
        "shape": shape.name,
        "balanced ms": balanced * 1e3,
        "zipf ms": skewed * 1e3,
        "loss": 1.0 - balanced / skewed,
        "rows of the fullest expert, balanced": rows["balanced"],
        "rows of the fullest expert, zipf": rows["zipf"],
    }


def decode(keep: Keep, *, device: str, tiny: bool = False, rounds: int = 60) -> list[dict[str, Any]]:
    """A part: steps without gradients, as one CUDA graph each, and the bytes that they must read."""
    rows = []
    for shape in decode_shapes()[:: 4 if tiny else 1]:
        sizes = replace(shape, dim=64, hidden_dim=96) if tiny else shape
        rows.append(_decode(sizes, Stopwatch(device), device, rounds=rounds))
        keep(rows)
        release(device)
    return rows


def _decode(shape: RaceShape, stopwatch: Stopwatch, device: str, *, rounds: int) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)
    weights = WeightSet.draw(shape, device, generator)
    inputs = Inputs.draw(shape, device, generator, 1)
    racer = ours(shape, device=device)
    racer.module.eval()
    racer.take(weights)
    x_TD = inputs.batches[0]

    def step() -> Tensor:
        with torch.no_grad():
            return racer(x_TD)

    eager = step()
    live = int(racer.expert_ids(x_TD).unique().numel())
    run = graphed(step, eager) if stopwatch.is_cuda else step
    entries = [Entry("graph", id, {"run": run}), Entry("eager", id, {"run": step})]
    found = interleaved(entries, stopwatch, rounds=rounds, warmup=5)
    expert_bytes = shape.weight_bytes // shape.num_experts
    router_bytes = shape.num_experts * shape.dim * 2 * BYTES
    graph_s = found["graph"]["run"].median_s
    return {
        "shape": shape.title,
        "T": shape.num_tokens,
        "live experts": live,
        "bytes read": live * expert_bytes + router_bytes,
        "graph us": graph_s * 1e6,
        "eager, launches hidden, us": found["eager"]["run"].median_s * 1e6,
        "host us": found["eager"]["run"].host_median_s * 1e6,
    }


def graphed(step: Callable[[], Tensor], expected: Tensor) -> Callable[[], object]:
    """Capture a step and give its replay, checked to the bit.

    Raises:
        AssertionError: the graph computes something else.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is allocated or compiled once must be so before capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, expected), "the graph gives other bits than the eager step"
    return graph.replay
