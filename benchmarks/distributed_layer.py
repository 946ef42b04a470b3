"""The layer with its experts spread over ranks, against itself on one rank and against DeepSpeed's `MoE` on as many.

    python -m benchmarks.distributed_layer                    # 1, 2 and 4 ranks of gloo on this machine
    python -m benchmarks.distributed_layer --ranks 1 2

Every rank has the same number of tokens, one thread, and all E experts between them. What counts is CPU time (user and
system, of all threads of the rank's process): ranks that share cores wait for one another, and their wall time says
more about the machine. Contenders, all with the same weights:

* expertmesh: `MoELayer` with `spread_experts`, all tokens to the ranks of their experts; on one rank the layer as it
  is.
* DeepSpeed MoE, dropless: `drop_tokens=False`, `ep_size` = ranks. The same result as ours, so the one to compare with.
* DeepSpeed MoE, capacity 1.0: its default. Less work than ours, since it drops rows (column "dropped").

DeepSpeed's second choice is not sampled (`top2_2nd_expert_sampling=False`), so that all choose the same experts. No
side sums the gradients of the router over ranks. Routings: as random tokens come, and with the fullest expert at twice
the mean, which is what `gpt-moe-demo` has at its end (column `load_imbalance` of its metrics).
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmarks.distributed_ranks import (
    CAPACITY,
    DROPLESS,
    OURS,
    Sample,
    Workload,
    check,
    imbalance_of,
    one_round,
)
from benchmarks.harness import checked, circumstances, write_report
from benchmarks.layer import DTYPES
from benchmarks.layer_peers import Case
from benchmarks.markdown import markdown_table
from benchmarks.race.peers import versions
from tests.support.ranks import RankPool

NOTE = (
    "Median of rounds, in which all contenders on all numbers of ranks take turns; a new batch, and so a new routing, "
    "in every round; before each timed step one that is not timed. CPU time is the mean of the ranks, wall time that "
    "of the last rank. `of one rank's`: CPU time per token relative to the same contender on one rank. `MB sent` is "
    "what a rank hands to others in forward and backward. Freed memory stays with the process, as in our trainer (for "
    "all contenders)."
)


def rows_of(
    work: Workload, imbalance: float, samples: dict[int, list[list[dict[str, Sample]]]]
) -> list[dict[str, Any]]:
    """Give table rows of one workload.

    Args:
        work: it.
        imbalance: as measured.
        samples: by number of ranks: [round][rank].
    """
    names = list(next(iter(samples.values()))[0][0])
    cpu, wall = {}, {}
    for n, rounds in samples.items():
        for name in names:
            cpu[n, name] = statistics.median(statistics.mean(rank[name].cpu_s for rank in ranks) for ranks in rounds)
            wall[n, name] = statistics.median(max(rank[name].wall_s for rank in ranks) for ranks in rounds)
    fewest = min(samples)
    return [
        {
            "activation": work.case.activation,
            "dtype": str(work.case.dtype).removeprefix("torch."),
            "fullest / mean": round(imbalance, 2),
            "ranks": n,
            "contender": name,
            "CPU ms per rank": cpu[n, name] * 1e3,
            "CPU us per token": cpu[n, name] * 1e6 / work.case.num_tokens,
            "of one rank's": cpu[n, name] / cpu[fewest, name],
            "expertmesh is faster by": cpu[n, name] / cpu[n, OURS],
            "wall ms": wall[n, name] * 1e3,
            "MB sent": statistics.mean(rank[name].sent_bytes for rank in samples[n][-1]) / 1e6,
            "dropped": statistics.mean(rank[name].dropped for rank in samples[n][-1]),
            "rounds": len(samples[n]),
        }
        for n in samples
        for name in names
    ]


def summary_of(rows: Sequence[dict[str, Any]]) -> str:
    """Give the ratios that matter as a small table, the worst number of ranks of each."""
    lines = []
    for key in dict.fromkeys((r["activation"], r["dtype"], r["fullest / mean"]) for r in rows):
        here = [r for r in rows if (r["activation"], r["dtype"], r["fullest / mean"]) == key]
        several = [r for r in here if r["ranks"] > 1] or here

        def of(name: str, column: str, several: list[dict[str, Any]] = several) -> dict[int, float]:
            return {r["ranks"]: r[column] for r in several if r["contender"] == name}

        lines.append(
            {
                "activation": key[0],
                "dtype": key[1],
                "fullest / mean": key[2],
                "ours, of one rank's": _by_ranks(of(OURS, "of one rank's")),
                "faster than DeepSpeed, dropless": _by_ranks(of(DROPLESS, "expertmesh is faster by")),
                "faster than DeepSpeed, capacity 1.0": _by_ranks(of(CAPACITY, "expertmesh is faster by")),
            }
        )
    return markdown_table(lines)


def _by_ranks(values: dict[int, float]) -> str:
    return ", ".join(f"{value:.2f} x on {n}" for n, value in values.items()) or "-"


def measure(work: Workload, pools: dict[int, RankPool], rounds: int) -> list[dict[str, Any]]:
    """Check and time one workload on all pools."""
    for n, pool in pools.items():
        checked(f"layer on {n} ranks", lambda pool=pool: pool.run(check, work))
    imbalance = pools[max(pools)].run(imbalance_of, work)[0]
    samples: dict[int, list[list[dict[str, Sample]]]] = {n: [] for n in pools}
    for number in range(rounds):
        for n, pool in pools.items():
            samples[n].append(pool.run(one_round, work, number))
    return rows_of(work, imbalance, samples)


def main(
    ranks: tuple[int, ...] = (1, 2, 4),
    rounds: int = 7,
    tokens: int = 2048,
    dim: int = 512,
    hidden_dim: int = 1024,
    num_experts: int = 16,
    top_k: int = 2,
    activations: tuple[str, ...] = ("swiglu", "gelu"),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    imbalances: tuple[float, ...] = (0.0, 2.0),
    name: str = "distributed_layer_cpu_202611",
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write.

    Args:
        ranks: numbers of ranks; the least is the one that others are compared with.
        rounds: timed rounds.
        tokens: T of each rank.
        dim: D.
        hidden_dim: F.
        num_experts: E.
        top_k: K.
        activations: swiglu (ours alone), gelu (DeepSpeed too).
        dtypes: float32, bfloat16.
        imbalances: fullest expert over the mean; 0: as random tokens come.
        name: of the result files.
        out: folder of the result files.
    """
    torch.set_num_threads(1)
    found = versions()
    around = circumstances(clock="cpu", peers=found) | {
        "clock": "CPU time of a rank's process (user and system, all threads)"
    }
    notes = [NOTE]
    if "deepspeed" not in found:
        notes.append("Not in the table: DeepSpeed: not installed.")
    table: list[dict[str, Any]] = []
    pools = {n: RankPool(n) for n in sorted(set(ranks))}
    try:
        for activation in activations:
            peers = (DROPLESS, CAPACITY) if activation == "gelu" and "deepspeed" in found else ()
            for dtype in dtypes:
                for imbalance in imbalances:
                    case = Case(tokens, dim, hidden_dim, num_experts, top_k, activation, DTYPES[dtype])
                    work = Workload(case, imbalance or None, peers)
                    table += measure(work, pools, rounds)
                    write_report(
                        out / name,
                        title=f"The layer spread over ranks of one machine, gloo (T={tokens} per rank, D={dim}, "
                        f"F={hidden_dim}, E={num_experts}, K={top_k})",
                        command=f"python -m benchmarks.distributed_layer --rounds {rounds}",
                        notes=[*notes, summary_of(table)],
                        around=around,
                        rows=table,
                    )
    finally:
        for pool in pools.values():
            pool.stop()


if __name__ == "__main__":
    tyro.cli(main)
