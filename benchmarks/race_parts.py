"""The smaller measurements of the race: ceilings of the device, maps alone, skewed routing, decoding."""

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.race_clock import Entry, Stopwatch, interleaved
from benchmarks.race_contenders import Inputs, WeightSet, ours
from benchmarks.race_shapes import BYTES, RaceShape
from benchmarks.routing_scaling import one_hot_cumsum
from torch import Tensor

from expertmesh.functional import route_metadata
from expertmesh.moe.types import Routing

LEAST_METADATA_SPEEDUP = 24.0
MOST_SKEW_LOSS = 0.10
LEAST_OF_FLOOR = {1: 0.5, 8: 0.5, 32: 0.8, 128: 0.8}
"""Share of the weight-bandwidth floor that decoding T tokens is to reach."""


def _entry(name: str, run: Callable[[], object], prepare: Callable[[int], object] = id) -> Entry:
    return Entry(name, prepare, {"run": run})


def ceilings(stopwatch: Stopwatch, device: str, *, tiny: bool, rounds: int) -> dict[str, float]:
    """Bytes/s of a large copy (read plus written) and FLOP/s of an 8192^3 product of random BF16."""
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


METADATA_CASES = ((65_536, 64, 2), (32_768, 128, 8), (65_536, 256, 8))
"""T, E, K; the first one carries the hard line."""


def metadata(stopwatch: Stopwatch, device: str, *, tiny: bool, rounds: int) -> list[dict[str, Any]]:
    """`route_metadata` against one-hot + cumsum, first checked for equal rows."""
    rows = []
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
    return rows


def zipf_ids(shape: RaceShape, device: str, generator: torch.Generator, power: float) -> Tensor:
    """(T, K) distinct experts per token, expert e with weight 1 / (e + 1)^power; 0: balanced. By Gumbel numbers."""
    rank_E = torch.arange(1, shape.num_experts + 1, device=device, dtype=torch.float32)
    size = (shape.num_tokens, shape.num_experts)
    u_TE = torch.rand(size, device=device, generator=generator).clamp_min(1e-20)
    return (-power * rank_E.log() - (-u_TE.log()).log()).topk(shape.top_k).indices


def skew(
    shape: RaceShape, stopwatch: Stopwatch, device: str, *, rounds: int, seed: int = 0
) -> dict[str, Any]:
    """Forward + backward of ours with given choices: balanced, and skewed as 1 / rank."""
    generator = torch.Generator(device).manual_seed(seed)
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


def decode(
    shape: RaceShape,
    stopwatch: Stopwatch,
    device: str,
    *,
    bytes_per_s: float,
    rounds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """A step without gradients, as one CUDA graph, against reading the live experts' weights once."""
    generator = torch.Generator(device).manual_seed(seed)
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
    floor_s = (live * expert_bytes + shape.num_experts * shape.dim * 2 * BYTES) / bytes_per_s
    graph_s = found["graph"]["run"].median_s
    return {
        "shape": shape.title,
        "T": shape.num_tokens,
        "live experts": live,
        "floor us": floor_s * 1e6,
        "graph us": graph_s * 1e6,
        "of the floor": floor_s / graph_s,
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
