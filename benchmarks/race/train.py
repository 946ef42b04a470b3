"""End to end on one GPU: `gpt-moe-1b` in training, its utilisation, its twin in transformers, its dense twin's loss.

    python -m benchmarks.race.train                             # speed, then five minutes of the model: nine minutes
    python -m benchmarks.race.train --parts dense               # the dense twin for as many tokens, in another call
    python -m benchmarks.race.train --device cpu --tiny         # a dry run

* speed: tokens/s of the trainer's own step (eager, and with the model under torch.compile) and of the plain loop over
  transformers' Mixtral of the same shape in eager mode (its default, and its grouped_mm). Utilisation is 3 x the
  forward's matrix operations per token (`models/gpt/flops.py`; causal attention counts the keys that are seen) x
  tokens/s over the peak.
* moe, dense: runs of the trainer on the source of the standard library and the installed packages: the model for
  `--minutes`, then its dense twin of equal operations on the same tokens.

What an earlier call measured on the same hardware stays in the result files.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from benchmarks.curves import plot
from benchmarks.markdown import markdown_table
from benchmarks.race.budget import Budget
from benchmarks.race.corpus import gather
from benchmarks.race.layers import release
from benchmarks.race.measures import surroundings
from benchmarks.race.parts import Keep
from benchmarks.trainer import NEAR_UNIFORM, Batch, describe, first_loss, make_mixtral
from torch import nn

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.costs import gpt_costs
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.recipes import RECIPES, dense_twin
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.models.gpt.task import GPTTask
from expertmesh.runs.precision import resolve_precision
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_metrics
from expertmesh.training.optim import build_optimizer
from expertmesh.training.step import training_step

Part = Literal["speed", "moe", "dense"]
PEAK_FLOPS_PER_S = 989e12
"""Dense BF16 of an H100 or H200 (SXM), by the vendor's datasheet."""
UTILISATION = (
    "Utilisation: 3 x the forward's matrix operations per token (two per multiply-add; K experts; the keys that causal "
    f"attention sees; recomputation not counted) x tokens/s over {PEAK_FLOPS_PER_S / 1e12:.0f} TFLOP/s."
)
LEAST_UTILISATION = 0.30
LEAST_OVER_EAGER = 3.0
OURS, OURS_COMPILED = "expertmesh", "expertmesh, torch.compile"
EAGER = "transformers eager"
_WARMUP_STEPS = 3


def ours(config: GPTRunConfig, *, compiled: bool) -> Callable[[Batch], float]:
    """The trainer's own step with its model and optimizer."""
    precision = resolve_precision(config.train)
    task = GPTTask(config)
    model = task.builder.build(device=precision.device, dtype=precision.master_dtype)
    optimizer = build_optimizer(model, config.optim, compute_dtype=precision.compute_dtype)
    scaler = precision.scaler()
    backend = "inductor" if precision.device.type == "cuda" else "eager"  # no C++ compiler for a dry run
    run: nn.Module = torch.compile(model, backend=backend) if compiled else model
    count = 0

    def step(batch: Batch) -> float:
        nonlocal count
        result = training_step(task, run, optimizer, scaler, batch, step=count, precision=precision)
        count += 1
        return result.loss

    return step


def twin(config: GPTRunConfig, implementation: str) -> Callable[[Batch], float]:
    """The plain loop over transformers' model: autocast, micro-batches, clipping, AdamW (fused)."""
    precision = resolve_precision(config.train)
    device, size = precision.device, config.train.micro_batch_size or config.train.batch_size
    model = make_mixtral(config, implementation).to(device)
    optim = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    mixed = precision.uses_autocast

    def step(batch: Batch) -> float:
        ids_BS, targets_BS = (t.to(device) for t in batch)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for start in range(0, len(ids_BS), size):
            rows = slice(start, start + size)
            share = len(ids_BS[rows]) / len(ids_BS)
            with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
                output = model(input_ids=ids_BS[rows])
                loss = F.cross_entropy(output.logits.flatten(0, 1).float(), targets_BS[rows].flatten())
                aux = 0.0 if output.aux_loss is None else output.aux_loss
            ((loss + model.router_aux_loss_coef * aux) * share).backward()
            total += loss.detach() * share
        nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        return total.item()

    return step


def check(name: str, losses: list[float], expected: float) -> None:
    """A fresh model starts where it must, and learns.

    Raises:
        AssertionError: it does not.
    """
    assert all(map(math.isfinite, losses)), f"{name} has a loss that is not finite"
    assert abs(losses[0] - expected) < NEAR_UNIFORM, (
        f"{name} starts at {losses[0]:.3f}, a fresh model has {expected:.3f}"
    )
    assert losses[-1] < losses[0], f"{name} does not learn: {losses[0]:.3f} to {losses[-1]:.3f}"


def timed_steps(
    step: Callable[[Batch], float], batches: list[Batch], warmup: int = _WARMUP_STEPS
) -> tuple[float, list[float]]:
    """Median seconds of a step after the warm-up (a step ends by reading the loss, so it waits for the device),
    losses."""
    seconds, losses = [], []
    for batch in batches:
        began = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[warmup:]), losses


def speed(
    config: GPTRunConfig,
    *,
    steps: int,
    budget: Budget,
    longest_s: float,
    add: Callable[[dict[str, Any]], object] = lambda row: None,
    warmup: int = _WARMUP_STEPS,
    compiled: bool = True,
) -> list[dict[str, Any]]:
    """Tokens/s of all trainees, one after another; a model of a billion parameters leaves no room for two."""
    data = GPTTask(config).prepare()
    size = config.train.batch_size
    batches = [data.batch(i * size, size) for i in range(warmup + steps)]
    flops = forward_flops(config.model, seq_len=config.data.seq_len).training_flops()
    trainees: list[tuple[str, Callable[[], Callable[[Batch], float]]]] = [
        (OURS, lambda: ours(config, compiled=False)),
        (EAGER, lambda: twin(config, "eager")),
        ("transformers grouped_mm", lambda: twin(config, "grouped_mm")),
    ]
    if compiled:
        trainees.append((OURS_COMPILED, lambda: ours(config, compiled=True)))
    device = str(resolve_precision(config.train).device)
    rows: list[dict[str, Any]] = []
    for name, make in trainees:
        if not budget.allows(longest_s):
            print(f"{name}: left out, {budget.left_s:.0f} s are left", flush=True)
            continue
        began = time.monotonic()
        try:
            seconds, losses = timed_steps(make(), batches, warmup)
            check(name, losses, first_loss(config))
        except Exception as error:
            if name == OURS:
                raise
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            release(device)
        tokens_per_s = batches[0][0].numel() / seconds
        rows.append(
            {
                "trainee": name,
                "ms per step": seconds * 1e3,
                "tokens/s": round(tokens_per_s),
                "TFLOP/s": flops * tokens_per_s / 1e12,
                "utilisation": flops * tokens_per_s / PEAK_FLOPS_PER_S,
                "loss, first to last": f"{losses[0]:.3f} - {losses[-1]:.3f}",
                "steps timed": steps,
            }
        )
        add(rows[-1])
        print(f"{name}: {tokens_per_s:,.0f} tokens/s; {time.monotonic() - began:.0f} s", flush=True)
    return rows


def speed_part(keep: Keep, *, device: str, tiny: bool = False, budget_s: float = 85.0) -> list[dict[str, Any]]:
    """A part of the race: tokens/s of ours and of the twins that fit the seconds, on a little source text."""
    config = configuration(
        device=device,
        tiny=tiny,
        batch_size=32,
        micro_batch_size=16,
        corpus=Path("runs/race_train/corpus"),
        max_bytes=20 << 20,
    )
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        keep(rows)

    budget = Budget(budget_s)
    if tiny:  # torch.compile is tried by the properties of a layer
        return speed(config, steps=2, budget=budget, longest_s=0.0, add=add, warmup=1, compiled=False)
    return speed(config, steps=5, budget=budget, longest_s=20.0, add=add)


def run_for(config: GPTRunConfig, *, kind: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """Train and give the curve."""
    evaluations = min(steps, 12)
    config = config.updated(
        {
            "train.steps": steps,
            "train.run_dir": str(run_dir / kind),
            "train.resume": "auto",
            "train.eval_every": max(1, steps // evaluations),
            "train.eval_batches": 4,
            "train.checkpoint_every": steps,
            "train.keep_last": 1,
            "train.tensorboard": False,
            "optim.warmup_steps": max(1, min(config.optim.warmup_steps, steps // 10)),
        }
    )
    result = train(config, recipe=f"{kind} of benchmarks.race.train")
    metrics = read_metrics(RunDir(config.train.run_dir).metrics)
    tokens = config.train.batch_size * config.data.seq_len
    curve = [[m["step"] * tokens, m["eval_loss"]] for m in metrics if "eval_loss" in m]
    curve.insert(0, [0, metrics[0]["initial_eval_loss"]])
    parameters = count_parameters(config.model)
    return {
        "kind": kind,
        "steps": steps,
        "tokens": result.items,
        "seconds": result.seconds,
        "loss": curve[-1][1],
        "bits_per_byte": result.evaluation["bits_per_byte"],
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "forward_flops_per_token": forward_flops(config.model, seq_len=config.data.seq_len).total_flops,
        "curve": curve,
    }


def verdicts(record: dict[str, Any]) -> list[str]:
    """What the hard lines say."""
    rows = {row["trainee"]: row for row in record.get("speed", ())}
    lines = []
    mine = [rows[name] for name in (OURS, OURS_COMPILED) if name in rows]
    if mine:
        best = max(mine, key=lambda row: row["tokens/s"])
        word = "holds" if best["utilisation"] >= LEAST_UTILISATION else "MISSED"
        lines.append(
            f"Utilisation {100 * best['utilisation']:.1f} % ({best['trainee']}): {word} (at least "
            f"{100 * LEAST_UTILISATION:.0f} % of {PEAK_FLOPS_PER_S / 1e12:.0f} TFLOP/s)."
        )
        if EAGER in rows:
            ratio = best["tokens/s"] / rows[EAGER]["tokens/s"]
            word = "holds" if ratio >= LEAST_OVER_EAGER else "MISSED"
            lines.append(f"{ratio:.2f} x the tokens/s of {EAGER}: {word} (at least {LEAST_OVER_EAGER} x).")
    runs = {run["kind"]: run for run in record.get("runs", ())}
    if len(runs) == 2:
        gain = runs["dense"]["loss"] - runs["moe"]["loss"]
        lines.append(
            f"After {runs['moe']['tokens'] / 1e6:.1f} million tokens the experts are {gain:+.4f} nats per token better "
            "than the dense twin of equal operations."
        )
    return lines


def write(path: Path, record: dict[str, Any], *, command: str) -> None:
    """path.json, path.md and, with a run, path.svg."""
    around = record["circumstances"]
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    text = [
        "# Training a GPT with experts end to end on one GPU",
        f"`{command}`",
        f"{around['gpu']}; {around['cpu']}; wall time; {versions}; {around['date']}.",
        record["model"],
        UTILISATION,
        *verdicts(record),
    ]
    if record.get("speed"):
        text.append(markdown_table(record["speed"]))
    runs = record.get("runs", [])
    if runs:
        text.append(markdown_table([{k: v for k, v in run.items() if k != "curve"} for run in runs]))
        text.append(f"![validation loss against tokens]({path.with_suffix('.svg').name})")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    if runs and all(len(run["curve"]) > 1 for run in runs):
        curves: dict[str, list[Any]] = {}
        for run in runs:
            curves.setdefault(run["kind"], []).append(run["curve"][1:])
        labels = {"x_label": "tokens", "y_label": "validation loss (nats per token)"}
        path.with_suffix(".svg").write_text(plot(curves, **labels))


def configuration(
    *, device: str, tiny: bool, batch_size: int, micro_batch_size: int, corpus: Path, max_bytes: int
) -> GPTRunConfig:
    """The recipe at this batch size, without recomputation, on the gathered source."""
    changes: dict[str, Any] = {"train.device": device, "train.dtype": "bfloat16"}
    if tiny:
        changes |= {"model.num_layers": 1, "data.max_bytes": 100_000}
        return RECIPES["gpt-moe-test"]().updated(changes)
    changes |= {
        "train.batch_size": batch_size,
        "train.micro_batch_size": micro_batch_size,
        "train.activation_checkpointing": False,
        "data.path": str(gather(corpus, max_bytes=max_bytes)),
    }
    return RECIPES["gpt-moe-1b"]().updated(changes)


def main(
    device: str = "cuda",
    parts: tuple[Part, ...] = ("speed", "moe"),
    tiny: bool = False,
    batch_size: int = 32,
    micro_batch_size: int = 16,
    steps: int = 8,
    minutes: float = 5.0,
    run_steps: int | None = None,
    budget_s: float = 570.0,
    max_megabytes: int = 240,
    runs: Path = Path("runs/race_train"),
    name: str | None = None,
    out: Path = Path("benchmarks/results"),
) -> None:
    """Measure, train, write.

    Args:
        device: cuda, or cpu with tiny.
        parts: speed; moe: the run of the model; dense: that of its dense twin, for the tokens of the model's run.
        tiny: the test recipe, for a dry run.
        batch_size: sequences of 2,048 tokens per optimizer step.
        micro_batch_size: sequences per forward pass.
        steps: timed steps per trainee.
        minutes: of the model's run; its steps are set from the measured speed.
        run_steps: optimizer steps of the runs instead; for the dense twin without a record of the model's run.
        budget_s: begin nothing that would end later than this.
        max_megabytes: of source text.
        runs: folder of the run directories.
        name: of the result files; none: train_ and the GPU's name and the month.
        out: folder of the result files.
    """
    budget = Budget(budget_s)
    around = surroundings(device)
    words = around["gpu"].split(",")[0].lower().split()
    gpu = next((w for w in words if any(c.isdigit() for c in w)), "cpu_dry_run")
    path = out / (name or f"train_{gpu}_{time.strftime('%Y%m')}")
    record: dict[str, Any] = {"circumstances": around}
    if path.with_suffix(".json").exists():
        earlier = json.loads(path.with_suffix(".json").read_text())
        record = earlier if earlier["circumstances"] == around else record
    config = configuration(
        device=device,
        tiny=tiny,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        corpus=runs / "corpus",
        max_bytes=max_megabytes << 20,
    )
    tokens = config.train.batch_size * config.data.seq_len
    parameters = count_parameters(config.model)
    record["model"] = (
        f"{parameters.total / 1e6:.0f} M parameters, {parameters.active / 1e6:.0f} M per token: {describe(config)}, "
        f"{tokens:,} tokens per step in micro-batches of {config.train.micro_batch_size or config.train.batch_size}."
    )
    costs = gpt_costs(config, num_ranks=1, dtype="bfloat16", on_gpu=True)
    print(
        f"{record['model']} Memory expected: {costs.memory.device_bytes / 2**30:.0f} GiB.",
        flush=True,
    )
    command = f"python -m benchmarks.race.train --parts {' '.join(parts)}"

    def save() -> None:
        write(path, record, command=command)

    if "speed" in parts:
        longest_s = 0.0 if tiny else 60.0
        record["speed"] = speed(config, steps=steps, budget=budget, longest_s=longest_s)
        save()
    seconds = next((r["ms per step"] / 1e3 for r in record.get("speed", ()) if r["trainee"] == OURS), None)
    kept = {run["kind"]: run for run in record.get("runs", ())}
    for kind, model in (("moe", config), ("dense", dense_twin(config))):
        if kind not in parts:
            continue
        count = run_steps or (kept["moe"]["steps"] if kind == "dense" and "moe" in kept else None)
        if count is None:
            if seconds is None:
                raise SystemExit("how many steps? run --parts speed first, or give --run-steps")
            count = max(1, round(min(60 * minutes, 0.9 * budget.left_s) / seconds))
        run = run_for(model, kind=kind, steps=count, run_dir=runs)
        kept[kind] = run
        record["runs"] = [kept[k] for k in ("moe", "dense") if k in kept]
        save()
        release(device)
    for line in verdicts(record):
        print(line)


if __name__ == "__main__":
    tyro.cli(main)
