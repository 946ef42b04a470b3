"""Does routing stay linear in the number of tokens? And how much faster are the maps than one-hot + cumsum?

    python -m benchmarks.routing_scaling
    python -m benchmarks.routing_scaling --threads 1 --clock cpu

    python -m benchmarks.routing_scaling --no-share           # without the layer of 3 GB

Times the router, the choice, the maps (`route_metadata`), and the moves out and back (`permute`, `combine`) against T
at fixed E, fits the slope of log(time) over log(T) and fails above 1.1; then the maps alone against one-hot + cumsum,
and their share of a large layer's forward (E=256, K=8), which is at most 5%.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from benchmarks.harness import (
    Clock,
    Contender,
    Timing,
    checked,
    circumstances,
    interleaved,
    write_report,
)
from torch import Tensor

from expertmesh import MoELayer
from expertmesh.functional import combine, permute, route_metadata

STEEPEST_SLOPE = 1.1
LEAST_SPEEDUP = 20.0
LARGEST_SHARE = 0.05


def one_hot_cumsum(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The usual way: (row of each slot, rows per expert) by a running count over a one-hot matrix (N, E)."""
    one_hot_NE = F.one_hot(ids_TK.flatten(), num_experts)
    count_NE = one_hot_NE.cumsum(0)
    place_N = (count_NE * one_hot_NE).sum(1) - 1
    rows_E = count_NE[-1]
    return (rows_E.cumsum(0) - rows_E)[ids_TK.flatten()] + place_N, rows_E


def check(permute: Callable[..., Tensor] = permute) -> None:
    """Both ways give the same rows, and permute followed by combine gives each token K times.

    Raises:
        AssertionError: they do not.
    """
    ids_TK = torch.randint(0, 64, (500, 2))
    metadata = route_metadata(ids_TK, 64)
    row_N, rows_E = one_hot_cumsum(ids_TK, 64)
    assert torch.equal(metadata.row_of_slot_N.long(), row_N), "rows differ from those of one-hot + cumsum"
    assert torch.equal(metadata.offsets_E.diff().long(), rows_E), "counts differ from those of one-hot + cumsum"
    x_TD = torch.randn(500, 8)
    assert torch.equal(combine(permute(x_TD, metadata), metadata, 2), 2 * x_TD), "moving rows changed them"


def routing_and_dispatch(num_tokens: int, dim: int, num_experts: int, top_k: int) -> Contender:
    """Router, choice, maps, rows out and back for T tokens."""
    x_TD, router_ED = torch.randn(num_tokens, dim), torch.randn(num_experts, dim)

    def run() -> None:
        scores_TE = (x_TD @ router_ED.T).softmax(-1)
        ids_TK = scores_TE.topk(top_k).indices
        metadata = route_metadata(ids_TK, num_experts)
        combine(permute(x_TD, metadata), metadata, top_k)

    return Contender(f"T={num_tokens}", run)


def share_of_layer(
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    dim: int,
    hidden_dim: int,
    rounds: int,
    clock: Clock,
) -> list[Timing]:
    """Time the maps of a layer's call, and its whole forward in BF16 without gradients."""
    layer = MoELayer(
        dim=dim,
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        top_k=top_k,
        seed=0,
        dtype=torch.bfloat16,
    ).eval()
    x_TD = torch.randn(num_tokens, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        ids_TK = layer(x_TD)[1].topk_expert_ids_TK
        found = [
            Contender("route_metadata", lambda: route_metadata(ids_TK, num_experts)),
            Contender("layer, forward", lambda: layer(x_TD)),
        ]
        return interleaved(found, rounds=rounds, warmup=1, clock=clock)


def slope(points: list[tuple[float, float]]) -> float:
    """Least-squares slope of log y over log x."""
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def main(
    threads: int = 0,
    clock: Clock = "wall",
    rounds: int = 9,
    dim: int = 256,
    num_experts: int = 64,
    top_k: int = 2,
    share: bool = True,
    name: str = "routing_cpu_202611",
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write; exit 1 when the slope is above 1.1, the maps are not 20 times faster, or too large a share.

    Args:
        threads: of PyTorch; 0: its default.
        clock: wall, or cpu (one thread's CPU time).
        rounds: timed rounds.
        dim: D.
        num_experts: E.
        top_k: K.
        share: measure the share of a large layer too, which takes 3 GB and half a minute.
        name: of the result files.
        out: folder of the result files.
    """
    if threads:
        torch.set_num_threads(threads)
    checked("routing", check)
    sizes = [2**i for i in range(10, 17)]
    timings = interleaved(
        [routing_and_dispatch(t, dim, num_experts, top_k) for t in sizes],
        rounds=rounds,
        warmup=2,
        clock=clock,
    )
    steepness = slope([(t, timing.median_s) for t, timing in zip(sizes, timings, strict=True)])
    table: list[dict[str, Any]] = [
        {"what": f"routing + dispatch + combine, {timing.name}", "median ms": timing.median_s * 1e3}
        for timing in timings
    ]
    ids_TK = torch.randint(0, 64, (65536, 2))
    maps, usual = interleaved(
        [
            Contender("route_metadata", lambda: route_metadata(ids_TK, 64)),
            Contender("one-hot + cumsum", lambda: one_hot_cumsum(ids_TK, 64)),
        ],
        rounds=rounds,
        warmup=2,
        clock=clock,
    )
    for timing in (maps, usual):
        table.append({"what": f"{timing.name}, T=65536, E=64, K=2", "median ms": timing.median_s * 1e3})
    speedup = usual.median_s / maps.median_s
    notes = [
        f"Slope of log(time) over log(T): {steepness:.3f} (at most {STEEPEST_SLOPE}).",
        f"`route_metadata` is {speedup:.1f} times faster than one-hot + cumsum (at least {LEAST_SPEEDUP:.0f}).",
    ]
    part = 0.0
    if share:
        shape = {
            "num_tokens": 65536,
            "num_experts": 256,
            "top_k": 8,
            "dim": 1024,
            "hidden_dim": 512,
        }
        large, layer = share_of_layer(**shape, rounds=3, clock=clock)
        for timing in (large, layer):
            what = f"{timing.name}, T=65536, E=256, K=8, D=1024, F=512, BF16"
            table.append({"what": what, "median ms": timing.median_s * 1e3})
        part = large.median_s / layer.median_s
        notes.append(
            f"`route_metadata` is {part:.2%} of the forward of a layer with E=256, K=8 (at most {LARGEST_SHARE:.0%})."
        )
    write_report(
        out / name,
        title=f"Routing and dispatch against T on the CPU (D={dim}, E={num_experts}, K={top_k})",
        command=f"python -m benchmarks.routing_scaling --threads {torch.get_num_threads()} --clock {clock}",
        notes=notes,
        around=circumstances(clock=clock),
        rows=table,
    )
    if steepness > STEEPEST_SLOPE or speedup < LEAST_SPEEDUP or part > LARGEST_SHARE:
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main)
