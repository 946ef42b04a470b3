"""Do experts learn more from the same tokens at the same cost? `gpt-moe-demo` against its dense twin, with AdamW.

    .venv/bin/python -m benchmarks.claims.equal_learning

Trains both with several seeds on the same batches, and writes curves and a table to docs/results/equal_learning.*.
Runs resume, so the script can be stopped and started again.
"""

import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import tyro
from benchmarks.curves import plot

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.runs.precision import resolve_precision
from expertmesh.runs.run_dir import RunDir, load_run
from expertmesh.training.evaluate import Evaluation, evaluate
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_metrics

KINDS = {"moe": "gpt-moe-demo", "dense": "gpt-dense-demo"}


def main(
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int | None = None,
    runs: Path = Path("runs/equal_learning"),
    out: Path = Path("docs/results"),
) -> None:
    """Train, compare, write.

    Args:
        seeds: one pair of runs each.
        steps: optimizer steps; none: the recipe's.
        runs: folder of the run directories.
        out: folder of the results.
    """
    results = []
    for seed in seeds:
        for kind, recipe in KINDS.items():
            config = configuration(recipe, seed=seed, steps=steps, run_dir=runs / f"{kind}_{seed}")
            print(f"== {kind}, seed {seed}")
            train(config, recipe=recipe)
            results.append({"kind": kind, "seed": seed, **measure(config)})
            report(results, out)
    check(results)
    for line in table(results):
        print(line)


def configuration(recipe: str, *, seed: int, steps: int | None, run_dir: Path) -> GPTRunConfig:
    """The recipe with this seed, evaluated often enough for a curve."""
    config = RECIPES[recipe]()
    steps = steps or config.train.steps
    return config.updated(
        {
            "train.seed": seed,
            "train.steps": steps,
            "train.run_dir": str(run_dir),
            "train.resume": "auto",
            "train.eval_every": max(1, steps // 10),
            "train.checkpoint_every": max(1, steps // 2),
            "train.tensorboard": False,
            "optim.name": "adamw",
            "optim.lr": 2e-3,
            "optim.warmup_steps": min(config.optim.warmup_steps, steps),
        }
    )


def measure(config: GPTRunConfig) -> dict[str, Any]:
    """Curve of a finished run, and its loss on all of the validation split."""
    metrics = read_metrics(RunDir(config.train.run_dir).metrics)
    tokens = config.train.batch_size * config.data.seq_len
    curve = [[m["step"] * tokens, m["eval_loss"]] for m in metrics if "eval_loss" in m]
    curve.insert(0, [0, metrics[0]["initial_eval_loss"]])
    final = final_evaluation(config)
    parameters = count_parameters(config.model)
    return {
        "curve": curve,
        "tokens": metrics[-1]["step"] * tokens,
        "loss": final["loss"],
        "bits_per_byte": final["bits_per_byte"],
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "forward_flops_per_token": forward_flops(
            config.model, seq_len=config.data.seq_len
        ).total_flops,
        "dtype": str(resolve_precision(config.train).compute_dtype).removeprefix("torch."),
    }


def final_evaluation(config: GPTRunConfig) -> Evaluation:
    """The last checkpoint on all of the validation split."""
    run, precision = load_run(config.train.run_dir), resolve_precision(config.train)
    task = GPTTask(config)
    model = task.builder.build(device=precision.device, dtype=precision.master_dtype)
    run.load_into(model.state_dict())
    return evaluate(
        task,
        model,
        task.prepare(),
        batch_size=config.train.batch_size,
        max_samples=None,
        precision=precision,
    )


def check(results: list[dict[str, Any]]) -> None:
    """The comparison is fair: same tokens, and operations per token within 2%."""
    tokens = {r["tokens"] for r in results}
    flops = [r["forward_flops_per_token"] for r in results]
    assert len(tokens) == 1, f"runs of different lengths: {tokens}"
    assert max(flops) <= 1.02 * min(flops), f"different operations per token: {set(flops)}"


def of_kind(results: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [r for r in results if r["kind"] == kind]


def table(results: list[dict[str, Any]]) -> list[str]:
    """A Markdown table, one line per run, then means and differences per seed."""
    lines = [
        "| model | seed | parameters (active) | tokens | validation loss | bits per byte |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        size = f"{r['parameters'] / 1e6:.1f} M ({r['active_parameters'] / 1e6:.1f} M)"
        lines.append(
            f"| {KINDS[r['kind']]} | {r['seed']} | {size} | {r['tokens']:,} | {r['loss']:.4f} | {r['bits_per_byte']:.4f} |"
        )
    lines.append("")
    for kind in KINDS:
        losses = [r["loss"] for r in of_kind(results, kind)]
        if losses:
            lines.append(
                f"{KINDS[kind]}: mean {statistics.mean(losses):.4f} over {len(losses)} seeds. "
            )
    dense = {r["seed"]: r["loss"] for r in of_kind(results, "dense")}
    for r in of_kind(results, "moe"):
        if r["seed"] in dense:
            gain = dense[r["seed"]] - r["loss"]
            lines.append(
                f"Seed {r['seed']}: the mixture of experts is {gain:+.4f} nats per token better. "
            )
    return lines


def report(results: list[dict[str, Any]], out: Path) -> None:
    """Write what there is so far."""
    out.mkdir(parents=True, exist_ok=True)
    first = results[0]
    about = {
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} thread(s), {first['dtype']}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (out / "equal_learning.json").write_text(
        json.dumps({"about": about, "runs": results}, indent=1) + "\n"
    )
    curves = {
        KINDS[kind]: [r["curve"][1:] for r in of_kind(results, kind)] for kind in ("moe", "dense")
    }
    labels = {"x_label": "tokens", "y_label": "validation loss (nats per token)"}
    (out / "equal_learning.svg").write_text(
        plot({name: c for name, c in curves.items() if c}, **labels)
    )
    text = [
        "# Equal learning: experts against a dense model of the same cost",
        "",
        "Same tokens in the same order, same operations per token, same learning rates; validation loss in nats per",
        "token on the whole validation split (Python's standard library, split by file).",
        f"Made by `python -m benchmarks.claims.equal_learning` on {about['hardware']}, torch {about['torch']}.",
        "The models are too small and the runs too short for more than what feed-forward layers store: no run here found",
        'induction heads, which are worth more than experts at this size (docs/log.md, "Equal learning").',
        "",
        *table(results),
        "",
        "![validation loss against tokens](equal_learning.svg)",
        "",
    ]
    (out / "equal_learning.md").write_text("\n".join(line.rstrip() for line in text))


if __name__ == "__main__":
    tyro.cli(main)
