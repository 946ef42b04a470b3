"""Decoding with the experts cut over ranks, against one process with one thread and with as many threads.

    python -m benchmarks.spread_decoding                    # one process, and 2 ranks of gloo on this machine

Every rank has one thread, and all generate the same tokens; a model of random weights (it only has to read them). Times
are wall times of one token of all sequences, the last rank's, after the prompts; they mean something on a quiet machine
only. CPU time is of a rank's process, and has what it waits for the others in it where gloo polls.
"""

import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from benchmarks.harness import checked, circumstances, write_report
from benchmarks.layer import DTYPES
from tests.support.ranks import RankPool

from expertmesh.comm.world import World
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.construct import give_memory
from expertmesh.parallel.inference import spread_for_inference


@dataclass(frozen=True)
class Setting:
    """A model and how it decodes.

    Attributes:
        dim: D.
        hidden_dim: F.
        num_experts: E.
        top_k: K.
        num_layers: all with experts.
        dtype: of the weights.
        batch_size: sequences.
        num_tokens: that are timed, one after the other.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    num_layers: int
    dtype: torch.dtype
    batch_size: int
    num_tokens: int


@functools.cache
def _world() -> World:
    return World()


@functools.lru_cache(maxsize=1)
def _model(setting: Setting, es_degree: int | None) -> GPT:
    config = RECIPES["gpt-moe-test"]().updated(
        {
            "model.dim": setting.dim,
            "model.num_layers": setting.num_layers,
            "model.num_heads": setting.dim // 64,
            "model.moe_every": 1,
            "model.max_seq_len": 1024,
            "model.moe.num_experts": (setting.num_experts,),
            "model.moe.top_k": setting.top_k,
            "model.moe.hidden_dim": setting.hidden_dim,
        }
    )
    model = GPT(config.model, device="meta", dtype=setting.dtype)
    if dist.get_world_size() > 1:
        spread_for_inference(model, _world(), es_degree=es_degree)
    give_memory(model, device="cpu")
    model.init_weights(0)
    return model.eval()


def decode(setting: Setting, es_degree: int | None, num_threads: int) -> tuple[list[list[int]], float, float, int]:
    """The tokens, wall and CPU seconds of one of them, and bytes of this rank's parameters."""
    torch.set_num_threads(num_threads)
    model = _model(setting, es_degree)
    prompts = [[1 + i, 2, 3] for i in range(setting.batch_size)]
    engine = Engine(model)
    params = SamplingParams(temperature=0, max_tokens=setting.num_tokens + 2, ignore_eos=True)
    for prompt in prompts:
        engine.add(prompt, params)

    def step() -> list[int]:
        return [output.token_ids[-1] for output in engine.step()]

    found = [step(), step()]
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    found += [step() for _ in range(setting.num_tokens)]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    local = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    n = setting.num_tokens
    return found, wall / n, cpu / n, sum(p.nbytes for p in local)


def main(
    ranks: tuple[int, ...] = (2,),
    rounds: int = 5,
    tokens: int = 24,
    batches: tuple[int, ...] = (1, 8),
    dim: int = 1024,
    hidden_dim: int = 3584,
    num_experts: int = 8,
    top_k: int = 2,
    layers: int = 4,
    dtype: str = "bfloat16",
    name: str = "spread_decoding_cpu_202611",
    out: Path = Path("benchmarks/results"),
) -> None:
    """Check, time, write.

    Args:
        ranks: numbers of ranks, each more than one.
        rounds: timed rounds, in which all take turns.
        tokens: that are timed in a round.
        batches: numbers of sequences.
        dim: D.
        hidden_dim: F.
        num_experts: E.
        top_k: K.
        layers: of the model.
        dtype: of the weights: float32, bfloat16.
        name: of the result files.
        out: folder of the result files.
    """
    around = circumstances(clock="wall") | {"threads": "one a rank, or as said"}
    pools = {n: RankPool(n) for n in (1, *ranks)}
    arms: dict[str, tuple[int, int | None, int]] = {"one process, 1 thread": (1, None, 1)}
    for n in ranks:
        arms[f"one process, {n} threads"] = (1, None, n)
        arms[f"{n} ranks, experts in {n} slices"] = (n, n, 1)
        arms[f"{n} ranks, whole experts"] = (n, 1, 1)
    rows: list[dict[str, Any]] = []
    try:
        for batch_size in batches:
            setting = Setting(dim, hidden_dim, num_experts, top_k, layers, DTYPES[dtype], batch_size, tokens)
            times: dict[str, list[list[Any]]] = {arm: [] for arm in arms}
            for _ in range(rounds):
                for arm, (n, es_degree, threads) in arms.items():
                    times[arm].append(pools[n].run(decode, setting, es_degree, threads))
            for arm, found in times.items():
                checked(arm, lambda found=found: _all_alike(found))
            rows += _rows(batch_size, times)
    finally:
        for pool in pools.values():
            pool.stop()
    write_report(
        out / name,
        title=f"Decoding on several ranks of one machine, gloo (D={dim}, F={hidden_dim}, E={num_experts}, K={top_k}, "
        f"{layers} layers, {dtype})",
        command=f"python -m benchmarks.spread_decoding --rounds {rounds}",
        notes=["Medians of rounds in which all take turns; `relative`: to one process with one thread."],
        around=around,
        rows=rows,
    )


def _all_alike(rounds: list[list[Any]]) -> None:
    """All ranks of an arm have chosen the same tokens in all rounds."""
    tokens = [rank[0] for ranks in rounds for rank in ranks]
    assert all(one == tokens[0] for one in tokens), "ranks chose different tokens"


def _rows(batch_size: int, times: dict[str, list[list[Any]]]) -> list[dict[str, Any]]:
    wall = {arm: statistics.median(max(rank[1] for rank in ranks) for ranks in found) for arm, found in times.items()}
    first = next(iter(wall.values()))
    return [
        {
            "sequences": batch_size,
            "arm": arm,
            "ms per token": 1e3 * wall[arm],
            "relative": wall[arm] / first,
            "CPU ms of a rank": 1e3 * statistics.median(statistics.mean(rank[2] for rank in ranks) for ranks in found),
            "MB of weights per rank": found[0][0][3] / 1e6,
        }
        for arm, found in times.items()
    ]


if __name__ == "__main__":
    tyro.cli(main)
