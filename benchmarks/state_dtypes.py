"""Optimizer states in few bytes: losses of finished runs against FP32's, paired by seed, and what a step takes.

    python -m benchmarks.state_dtypes losses --steps 160 --folder runs/state-dtypes   # goes on where it stopped
    python -m benchmarks.state_dtypes times                                           # interleaved in one process

`gpt-moe-demo`: Muon for matrices, AdamW for the rest; `--optimizer adamw` for AdamW alone, at the rate that suits it.
"""

import io
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from expertmesh.config.run import Optimizer, StateDtype
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.task import GPTTask
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.loop import train
from expertmesh.training.optim import build_optimizer
from expertmesh.training.step import training_step

RATES: dict[Optimizer, float] = {"muon": 12e-3, "adamw": 3e-3}
TYPES: tuple[StateDtype, ...] = ("float32", "bfloat16", "int8", "fp16-scaled")


@dataclass
class Losses:
    """Finished runs, of each seed one per type.

    Attributes:
        steps: of each run, with a whole schedule.
        batch_size: sequences per step.
        seeds: so many, from 0.
        optimizer: muon or adamw.
        dtype: of the computation.
        folder: of the runs.
        limit: stop before a further run after so many seconds.
    """

    steps: int = 160
    batch_size: int = 16
    seeds: int = 3
    optimizer: Literal["muon", "adamw"] = "muon"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    folder: Path = Path("runs/state-dtypes")
    limit: float = 1e9


@dataclass
class Times:
    """Steps by turns, processor time of one thread.

    Attributes:
        rounds: steps of each.
        batch_size: sequences per step.
        optimizer: muon or adamw.
        dtype: of the computation.
    """

    rounds: int = 12
    batch_size: int = 32
    optimizer: Literal["muon", "adamw"] = "muon"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


def config_of(options: Losses | Times, state_dtype: StateDtype) -> GPTRunConfig:
    """The demo's, changed."""
    changes = {
        "optim.name": options.optimizer,
        "optim.lr": RATES[options.optimizer],
        "optim.state_dtype": state_dtype,
        "train.batch_size": options.batch_size,
        "train.dtype": options.dtype,
        "train.tensorboard": False,
        "parallel.num_threads": 1,
    }
    return RECIPES["gpt-moe-demo"]().updated(changes)


def losses(options: Losses) -> None:
    """Train what is not trained yet, and print what there is."""
    began, found = time.monotonic(), {}
    for seed in range(options.seeds):
        for state_dtype in TYPES:
            name = f"{options.optimizer}-{state_dtype}-{seed}"
            steps = options.steps
            config = config_of(options, state_dtype).updated(
                {
                    "train.steps": steps,
                    "train.seed": seed,
                    "train.run_dir": str(options.folder / name),
                    "train.resume": "auto",
                    "train.eval_every": steps,
                    "train.eval_batches": 32,
                    "train.checkpoint_every": max(steps // 2, 1),
                    "optim.warmup_steps": max(steps // 12, 1),
                }
            )
            if time.monotonic() - began > options.limit:
                break
            result = train(config, console=Console(file=io.StringIO()))
            assert result.evaluation is not None
            found[state_dtype, seed] = result.evaluation["loss"]
            print(name, round(found[state_dtype, seed], 4), f"{result.seconds:.0f} s", flush=True)
    for state_dtype in TYPES[1:]:
        pairs = [found[state_dtype, s] - found["float32", s] for s in range(options.seeds) if (state_dtype, s) in found]
        if pairs:
            told = ", ".join(f"{p:+.4f}" for p in pairs)
            print(f"{state_dtype} less float32: mean {statistics.mean(pairs):+.4f} ({told})")


def times(options: Times) -> None:
    """Medians of whole steps and of the optimizer's part, and their ratios round by round."""
    torch.set_num_threads(1)
    arms = {}
    for state_dtype in TYPES:
        config = config_of(options, state_dtype)
        task, precision = GPTTask(config), resolve_precision(config.train)
        data = task.prepare()
        model = task.builder.build(device=precision.device, dtype=precision.master_dtype)
        optimizer = build_optimizer(model, config.optim, compute_dtype=precision.compute_dtype)
        arms[state_dtype] = task, precision, data, model.train(), optimizer
    whole: dict[StateDtype, list[float]] = {name: [] for name in TYPES}
    own: dict[StateDtype, list[float]] = {name: [] for name in TYPES}
    for state_dtype, (*_, optimizer) in arms.items():
        marks: list[float] = []
        optimizer.register_step_pre_hook(lambda *_, m=marks: m.append(time.process_time()))
        optimizer.register_step_post_hook(lambda *_, m=marks, n=state_dtype: own[n].append(time.process_time() - m[-1]))
    for step in range(options.rounds + 1):
        for state_dtype, (task, precision, data, model, optimizer) in arms.items():
            batch = data.batch(step * options.batch_size, options.batch_size)
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            began = time.process_time()
            training_step(task, model, optimizer, scaler, batch, step=step, precision=precision)
            whole[state_dtype].append(time.process_time() - began)
    table = {}
    for name in TYPES:
        ratios = [a / b for a, b in zip(whole[name][1:], whole["float32"][1:], strict=True)]
        table[name] = {
            "step_ms": round(1e3 * statistics.median(whole[name][1:]), 1),
            "optimizer_ms": round(1e3 * statistics.median(own[name][1:]), 1),
            "ratio": round(statistics.median(ratios), 3),
        }
    print(json.dumps({"optimizer": options.optimizer, "dtype": options.dtype, **table}, indent=1))


def main() -> None:
    """Command line."""
    found = tyro.cli(
        Annotated[Losses, tyro.conf.subcommand("losses")] | Annotated[Times, tyro.conf.subcommand("times")]
    )
    losses(found) if isinstance(found, Losses) else times(found)


if __name__ == "__main__":
    main()
