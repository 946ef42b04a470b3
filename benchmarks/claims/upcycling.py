"""Is a dense model that becomes a mixture of experts half-way better than one that stays dense, for the same operations?

    .venv/bin/python -m benchmarks.claims.upcycling

A trunk learns Python's standard library with a constant rate (wsd). At half, arms go on from the same weights with the same
further training operations: dense, with copies as experts, with half of each copy's units drawn anew, with virtual groups;
and a mixture of experts begins from nothing with these operations alone. The dense arm may keep its optimizer state ("goes
on"); all others, and a second dense candidate, begin with an empty one. The better dense candidate and the rates of the dense arm
and of the copies (which other upcycled arms take) are chosen on a seed of their own; then each arm runs with three others. Writes curves, table and bootstrap interval to docs/results/upcycling.*
after each run. Runs resume, so the script can be stopped and started again.
"""

import json
import platform
import random
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmarks.curves import plot

from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.source import read_into
from expertmesh.checkpoints.store import list_checkpoints, step_of
from expertmesh.models.gpt.family import GPT as FAMILY
from expertmesh.models.gpt.config import GPTRunConfig, begun_with
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.config.moe import MoEConfig
from expertmesh.config.text import TextConfig
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.models.task import Part
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.token_losses import token_losses
from expertmesh.models.upcycle import upcycle
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import RunDir, load_run
from expertmesh.training.init_from import save_as_run
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_metrics

ARMS = {
    "goes_on": "dense, goes on",
    "dense": "dense, begun again",
    "copy": "8 copies, top 2",
    "redraw": "8 copies, half redrawn, top 2",
    "virtual": "8 copies in halves, top 2 of 16",
    "scratch": "8 experts from scratch, top 2",
}
UPCYCLED: dict[str, dict[str, Any]] = {
    "copy": {"top_k": 2},
    "redraw": {"top_k": 2, "redraw": 0.5},
    "virtual": {"top_k": 1, "granularity": 2},
}
EXACT = ("copy", "virtual")
NEAR_NATS = 1e-3
DENSE = ("goes_on", "dense")
DONE = "window_losses.json"


@dataclass(frozen=True)
class Plan:
    """What is trained, and how long.

    Attributes:
        trunk_steps: steps before the upcycling, and of the dense arm after it; even.
        seeds: of the comparison.
        sweep_seed: of the choice of rates.
        lr: peak rate of the trunk.
        rates: rates of the arms, as ratios of it.
        batch_size: sequences per step.
        seq_len: tokens of a sequence.
        vocab_size: tokens of the vocabulary.
        dim: width; attention heads have 32.
        num_layers: layers, all of them with experts later.
        ffn_hidden_dim: hidden size of a dense feed-forward block.
        max_bytes: of text.
        path: text; none: Python's standard library.
        cache_dir: of the tokens; none: the usual.
        runs: folder of the run directories.
        out: folder of the results.
        resamples: of the bootstrap.
    """

    trunk_steps: int = 800
    seeds: tuple[int, ...] = (0, 1, 2)
    sweep_seed: int = 3
    lr: float = 3e-3
    rates: tuple[float, ...] = (0.5, 1.0)
    batch_size: int = 8
    seq_len: int = 128
    vocab_size: int = 512
    dim: int = 96
    num_layers: int = 2
    ffn_hidden_dim: int = 128
    max_bytes: int = 5_000_000
    path: str | None = None
    cache_dir: str | None = None
    runs: Path = Path("runs/upcycling")
    out: Path = Path("docs/results")
    resamples: int = 2000

    def config(self, seed: int, name: str, *, steps: int, **changes: Any) -> GPTRunConfig:
        """A run of the dense model, evaluated eight times."""
        every = max(1, steps // 8)
        usual = {
            "model": ModelConfig(
                vocab_size=self.vocab_size,
                max_seq_len=self.seq_len,
                dim=self.dim,
                num_layers=self.num_layers,
                num_heads=max(1, self.dim // 32),
                qk_norm=True,
                init_std=0.06,
                ffn_hidden_dim=self.ffn_hidden_dim,
                moe=MoEConfig(num_experts=()),
            ),
            "data": TextConfig(
                seq_len=self.seq_len,
                max_bytes=self.max_bytes,
                path=self.path,
                validation_fraction=0.1,
                cache_dir=self.cache_dir,
            ),
            "train": {
                "seed": seed,
                "steps": steps,
                "batch_size": self.batch_size,
                "run_dir": str(self.folder(seed, name)),
                "resume": "auto",
                "dtype": "float32",
                "device": "cpu",
                "eval_every": every,
                "checkpoint_every": every,
                "tensorboard": False,
            },
            "optim": {
                "lr": self.lr,
                "schedule": "wsd",
                "decay_fraction": 0.5,
                "min_lr_ratio": 0.0,
                "warmup_steps": max(1, steps // 20),
            },
            "parallel": {"num_threads": 1},
        }
        return GPTRunConfig.model_validate(usual).updated(changes)

    def folder(self, seed: int, name: str) -> Path:
        """Run directory."""
        return self.runs / f"{name}_{seed}"


def main(plan: Plan) -> None:
    """Choose rates, train, compare, write; what is done already is read."""
    plan.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"about": about(plan), "sweep": [], "runs": []}
    for seed in (plan.sweep_seed, *plan.seeds):
        trunk(plan, seed)
        if seed == plan.sweep_seed:
            candidates = [("goes_on", 1.0)]
            candidates += [(arm, rate) for arm in ("dense", "copy") for rate in plan.rates]
            for arm, rate in candidates:
                record["sweep"].append(finished(plan, seed, arm, rate))
                write(plan, record)
            record["chosen"] = chosen(record["sweep"])
        else:
            for arm, rate in record["chosen"].items():
                record["runs"].append(finished(plan, seed, arm, rate))
                record["interval"] = interval(plan, record)
                write(plan, record)
    print((plan.out / "upcycling.md").read_text())


def about(plan: Plan) -> dict[str, Any]:
    """The circumstances."""
    model = plan.config(0, "trunk", steps=1).model
    return {
        "hardware": f"{platform.machine()}, 1 thread, float32",
        "torch": torch.__version__,
        "trunk_steps": plan.trunk_steps,
        "tokens_per_step": plan.batch_size * plan.seq_len,
        "lr": plan.lr,
        "dense_parameters": count_parameters(model).total,
    }


def trunk(plan: Plan, seed: int) -> None:
    """Train the trunk up to where the dense arm's decay begins: half a trunk after the upcycling."""
    N = plan.trunk_steps
    kept = list_checkpoints(RunDir(plan.folder(seed, "trunk")).checkpoints)
    if N + N // 2 in map(step_of, kept):
        return
    config = plan.config(
        seed,
        "trunk",
        steps=N + N // 2,
        **{
            "optim.schedule_steps": 2 * N,
            "optim.decay_fraction": 0.25,
            "optim.warmup_steps": max(1, N // 20),
            "train.checkpoint_every": N // 2,
            "train.keep_every": N // 2,
            "train.eval_every": max(1, N // 8),
        },
    )
    print(f"== trunk, seed {seed}: {config.train.steps} steps")
    completed(config, "trunk")


def completed(config: GPTRunConfig, name: str) -> None:
    """Train to the end.

    Raises:
        SystemExit: a signal stopped it; the next call goes on.
    """
    if (signal := train(config, recipe=name).stopped_by) is not None:
        raise SystemExit(128 + int(signal))


def trunk_checkpoint(plan: Plan, seed: int) -> Path:
    """The trunk's state at the upcycling."""
    paths = list_checkpoints(RunDir(plan.folder(seed, "trunk")).checkpoints)
    return next(path for path in paths if step_of(path) == plan.trunk_steps)


def beginning(plan: Plan, seed: int, arm: str) -> Path:
    """A run of no steps with the weights that an arm begins with; made once."""
    folder = plan.folder(seed, f"begin_{arm}")
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    trunk_config = plan.config(seed, "trunk", steps=1)
    model = GPT(trunk_config.model, seed=seed)
    read_into(Checkpoint(trunk_checkpoint(plan, seed), prefix="model."), model.state_dict())
    if arm in UPCYCLED:
        upcycle(model, every=1, num_experts=8, seed=seed, **UPCYCLED[arm])
    config = trunk_config.updated(
        {"model": model.config.model_dump(), "train.run_dir": str(folder)}
    )
    tokenizer = plan.folder(seed, "trunk") / "tokenizer.json"
    save_as_run(model, config, recipe=f"upcycled: {arm}", files={"tokenizer.json": tokenizer})
    (folder / "done").touch()
    return folder


def flops(plan: Plan, model: ModelConfig) -> int:
    """Operations of a forward pass per token."""
    return forward_flops(model, seq_len=plan.seq_len).total_flops


def arm_config(plan: Plan, seed: int, arm: str, rate: float) -> GPTRunConfig:
    """The run of an arm: as many steps as the dense arm's operations allow."""
    N, name = plan.trunk_steps, f"{arm}_{rate:g}"
    lr = {"optim.lr": plan.lr * rate}
    if arm == "goes_on":
        changes: dict[str, Any] = {
            "optim.decay_fraction": 0.25,
            "optim.warmup_steps": max(1, N // 20),
            "train.branch_from": str(plan.folder(seed, "trunk")),
            "train.eval_every": max(1, N // 8),
        }
        return plan.config(seed, name, steps=2 * N, **changes)
    dense = plan.config(seed, name, steps=N)
    per_token = flops(plan, dense.model)
    if arm == "scratch":
        copied = GPT(dense.model)
        upcycle(copied, every=1, num_experts=8, top_k=2)
        model = copied.config
        steps = N * per_token // flops(plan, model)
        return plan.config(seed, name, steps=steps, model=model.model_dump(), **lr)
    begin = beginning(plan, seed, arm)
    before = load_run(begin, FAMILY).config
    assert isinstance(before, GPTRunConfig)
    steps = N * per_token // flops(plan, before.model)
    changes = {"train.init_from": str(begin), **lr}
    return begun_with(plan.config(seed, name, steps=steps, **changes), before)


def finished(plan: Plan, seed: int, arm: str, rate: float) -> dict[str, Any]:
    """Train an arm unless it is done; its curve, and its loss on all of the validation split."""
    config = arm_config(plan, seed, arm, rate)
    if not (Path(config.train.run_dir) / DONE).exists():
        print(f"== {arm}, rate {rate:g}, seed {seed}: {config.train.steps} steps")
        completed(config, arm)
    metrics = read_metrics(RunDir(config.train.run_dir).metrics)
    per_step = 3 * flops(plan, config.model) * plan.batch_size * plan.seq_len
    begun = 0
    if arm == "goes_on":  # its lines begin at the branch
        metrics = read_metrics(RunDir(plan.folder(seed, "trunk")).metrics) + metrics
        begun = plan.trunk_steps
        initial = next(m["eval_loss"] for m in metrics if m["step"] == begun)
    else:
        initial = metrics[0]["initial_eval_loss"]
    curve = [[0.0, initial]] + [
        [(m["step"] - begun) * per_step, m["eval_loss"]]
        for m in metrics
        if "eval_loss" in m and m["step"] > begun
    ]
    losses = window_losses(plan, config)
    parameters = count_parameters(config.model)
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "steps": config.train.steps - begun,
        "training_flops": (config.train.steps - begun) * per_step,
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "initial_loss": initial,
        "loss": statistics.mean(losses),
        "curve": curve,
    }


def window_losses(plan: Plan, config: GPTRunConfig) -> list[float]:
    """Mean loss of each validation window in nats per token; kept beside the run."""
    path = Path(config.train.run_dir) / DONE
    if path.exists():
        found: list[float] = json.loads(path.read_text())
        return found
    opened = open_model(config.train.run_dir, family=FAMILY)
    task, model, precision = opened.task, opened.model, opened.precision
    assert isinstance(task, GPTTask)
    losses: list[float] = []
    with torch.no_grad(), precision.autocast():
        for ids_BS, targets_BS, _ in task.prepare().validation(None, plan.batch_size):
            part = Part(0, slice(0, len(ids_BS)), Ranks())
            each = token_losses(model(ids_BS).logits_BSV, part.positions(targets_BS))
            losses += each.view(ids_BS.shape).mean(1).tolist()
    path.write_text(json.dumps(losses))
    return losses


def chosen(sweep: list[dict[str, Any]]) -> dict[str, float]:
    """The rates of all arms, by the lowest loss of the sweep; of the two dense candidates, the better one only."""
    dense, copy = (
        min((r for r in sweep if r["arm"] in arms), key=lambda r: float(r["loss"]))
        for arms in (DENSE, ("copy",))
    )
    return {dense["arm"]: dense["rate"], **dict.fromkeys(UPCYCLED, copy["rate"]), "scratch": 1.0}


def interval(plan: Plan, record: dict[str, Any]) -> dict[str, list[float]]:
    """Mean gain over the dense arm in nats per token and its 95% interval, by arm, over the seeds that are done.

    Bootstrap in two stages: seeds, then windows of each; both arms have the same windows.
    """
    rates = record["chosen"]
    dense = next(arm for arm in rates if arm in DENSE)
    done = {(r["arm"], r["seed"]) for r in record["runs"]}
    found = {}
    for arm, rate in rates.items():
        seeds = [s for s in plan.seeds if {(arm, s), (dense, s)} <= done]
        if arm == dense or not seeds:
            continue
        gains = {}
        for seed in seeds:
            pair = [
                torch.tensor(window_losses(plan, arm_config(plan, seed, a, r)), dtype=torch.float64)
                for a, r in ((dense, rates[dense]), (arm, rate))
            ]
            gains[seed] = pair[0] - pair[1]
        draw, generator = random.Random(0), torch.Generator().manual_seed(0)
        means = []
        for _ in range(plan.resamples):
            parts = [gains[s] for s in draw.choices(seeds, k=len(seeds))]
            picked = [
                g[torch.randint(len(g), (len(g),), generator=generator)].mean() for g in parts
            ]
            means.append(float(torch.stack(picked).mean()))
        means.sort()
        low, high = (means[int(q * (len(means) - 1))] for q in (0.025, 0.975))
        mean = float(torch.stack([g.mean() for g in gains.values()]).mean())
        found[arm] = [mean, low, high]
    return found


def check(record: dict[str, Any]) -> list[str]:
    """What must hold of finished runs and does not: equal beginnings, equal operations.

    Returns:
        A line for each failure.
    """
    problems = []
    runs = record["sweep"] + record["runs"]
    before = {r["seed"]: r["initial_loss"] for r in runs if r["arm"] in DENSE}
    for run in runs:
        start = before.get(run["seed"])
        if run["arm"] in EXACT and start is not None:
            difference = abs(run["initial_loss"] - start)
            if difference > NEAR_NATS:
                problems.append(
                    f"{run['arm']}, seed {run['seed']}: begins {difference:.1e} nats off"
                )
    most = max(r["training_flops"] for r in runs)
    dense = [r["training_flops"] for r in runs if r["arm"] in DENSE]
    if dense and most > max(dense):
        problems.append("an arm has more operations than the dense one")
    return problems


def write(plan: Plan, record: dict[str, Any]) -> None:
    """Results so far."""
    record["problems"] = check(record)
    (plan.out / "upcycling.json").write_text(json.dumps(record, indent=1) + "\n")
    (plan.out / "upcycling.md").write_text("\n".join(page(record)))
    shown = record["runs"] or record["sweep"]
    late = [p[1] for r in shown if r["arm"] != "scratch" for p in r["curve"]]
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for run in shown:
        points = [(x / 1e12, y) for x, y in run["curve"] if y <= max(late)]
        curves.setdefault(ARMS[run["arm"]], []).extend([points] if points else [])
    (plan.out / "upcycling.svg").write_text(
        plot(
            {name: lines for name, lines in curves.items() if lines},
            x_label="further training operations (TFLOP)",
            y_label="validation loss (nats per token)",
        )
    )


def page(record: dict[str, Any]) -> list[str]:
    """The Markdown page."""
    facts = record["about"]
    tokens = facts["trunk_steps"] * facts["tokens_per_step"]
    lines = [
        "# Upcycling: a trained dense model becomes a mixture of experts half-way",
        "",
        f"A dense GPT of {facts['dense_parameters'] / 1e6:.2f} M parameters learns Python's standard library for {tokens:,} tokens at a constant",
        "rate; then arms go on from the same weights with the same further training operations, which are those of as many",
        "tokens again for the dense model. Validation loss in nats per token on the whole validation split (by file).",
        f"Made by `python -m benchmarks.claims.upcycling` on {facts['hardware']}, torch {facts['torch']}; what is compared is",
        "explained there. Rates, and which dense arm counts, were chosen on a seed of their own (last table); all upcycled arms",
        "have the copies' rate, the model from scratch the trunk's.",
        "",
        "| arm | seed | parameters (active) | steps | loss at step 0 | loss at the end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [row(r) for r in record["runs"]]
    lines += [
        "",
        "| arm | seeds | gain over the dense arm | 95% interval (bootstrap over seeds and windows) |",
    ]
    lines += ["| --- | --- | --- | --- |"]
    for arm, (mean, low, high) in record.get("interval", {}).items():
        seeds = sum(run["arm"] == arm for run in record["runs"])
        lines.append(f"| {ARMS[arm]} | {seeds} | {mean:+.4f} | {low:+.4f} to {high:+.4f} |")
    lines += ["", *record["problems"], "", "![validation loss](upcycling.svg)", ""]
    lines += ["| rate, of the trunk's | arm | loss at the end |", "| --- | --- | --- |"]
    for r in record["sweep"]:
        lines.append(f"| {r['rate']:g} | {ARMS[r['arm']]} | {r['loss']:.4f} |")
    return [*lines, ""]


def row(run: dict[str, Any]) -> str:
    """One line of the table."""
    size = f"{run['parameters'] / 1e6:.2f} M ({run['active_parameters'] / 1e6:.2f} M)"
    return (
        f"| {ARMS[run['arm']]} | {run['seed']} | {size} | {run['steps']:,} | {run['initial_loss']:.4f} "
        f"| {run['loss']:.4f} |"
    )


if __name__ == "__main__":
    main(tyro.cli(Plan))
