"""Predictions on this machine against runs: 12 small models on 1, 2 and 4 gloo ranks, after doctor --cluster and bench
comm.

    python -m benchmarks.plan_here --output benchmarks/results/plan_here_cpu_202611.json

Other programs may compute beside it, so that times are CPU seconds of a rank's thread, with more ranks than cores times
their ratio: the wall time of a machine that does nothing else, but for waiting. Wall times stand beside them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.markdown import markdown_table

import expertmesh as em
from expertmesh.costs.hardware import find_cluster
from expertmesh.planner.configured import as_configured
from expertmesh.planner.plan import plan

FEW, STEPS = 3, 13
COMMON = {
    "train.steps": STEPS,
    "train.dtype": "float32",
    "train.eval_every": 1000,
    "train.eval_batches": 1,
    "train.tensorboard": False,
    "optim.name": "adamw",
    "parallel.num_threads": 1,
}
MODELS = {
    "narrow": {
        "model.dim": 128,
        "model.num_heads": 4,
        "model.num_layers": 4,
        "model.moe.hidden_dim": 128,
        "train.batch_size": 16,
    },
    "wide": {
        "model.dim": 256,
        "model.num_heads": 4,
        "model.num_layers": 2,
        "model.moe.hidden_dim": 512,
        "model.moe.num_experts": 8,
        "train.batch_size": 16,
    },
    "long": {
        "model.dim": 128,
        "model.num_heads": 4,
        "model.num_layers": 2,
        "model.max_seq_len": 256,
        "data.seq_len": 256,
        "model.moe.num_experts": 16,
        "model.moe.hidden_dim": 128,
        "train.batch_size": 8,
    },
    "gathered": {
        "model.dim": 192,
        "model.num_heads": 4,
        "model.num_layers": 3,
        "model.moe.num_experts": 8,
        "model.moe.hidden_dim": 192,
        "train.batch_size": 16,
        "parallel.route_degree": 1,
    },
}
RANKS = (1, 2, 4)


def config_of(name, folder):
    changes = COMMON | MODELS[name] | {"train.run_dir": str(folder)}
    return em.recipe("gpt-moe-test", changes)


def started(number, words, **options):
    """A program on so many ranks."""
    launch = [sys.executable]
    if number > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    done = subprocess.run([*launch, "-m", *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def most_allocated(profile):
    """The largest number of bytes that were allocated at once, from the profiler's records of each allocation."""
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def work(path):
    """What a rank does: a training whose shortest step counts, and a short one whose allocations are counted."""
    import torch

    given = json.loads(Path(path).read_text())
    folder, name = Path(given["folder"]), given["model"]
    cpu = []
    for steps in (2, FEW, STEPS):  # the first, in which all is loaded and made, does not count
        changes = {"train.steps": steps, "optim.warmup_steps": 1}
        began = time.process_time()
        em.train(config_of(name, folder / f"run{steps}").updated(changes), quiet=True)
        cpu.append(time.process_time() - began)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        short = {"train.steps": 2, "optim.warmup_steps": 1}
        em.train(config_of(name, folder / "short").updated(short), quiet=True)
    if os.environ.get("RANK", "0") == "0":
        lines = (folder / f"run{STEPS}" / "metrics.jsonl").read_text().splitlines()
        rates = [json.loads(line)["tokens_per_second"] for line in lines][3:]
        step = (cpu[2] - cpu[1]) / (STEPS - FEW)
        found = {"cpu_s": step, "median": median(rates), "bytes": most_allocated(profile)}
        (folder / "found.json").write_text(json.dumps(found))


def measured(name, number):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        path.write_text(json.dumps({"model": name, "folder": folder}))
        started(number, ["benchmarks.plan_here", "--work", str(path)])
        return json.loads((Path(folder) / "found.json").read_text())


def cluster_of(number, folder):
    path = folder / f"ranks{number}.toml"
    started(number, ["expertmesh", "doctor", "--cluster", str(path)])
    if number > 1:
        started(number, ["expertmesh", "bench", "comm", "--cluster", str(path)])
    return find_cluster(str(path))


def rows():
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in RANKS:
            cluster = cluster_of(number, Path(folder))
            for name in MODELS:
                config = config_of(name, Path(folder) / "x")
                problem = plan(config, cluster=cluster, imbalance=1.1).problem
                said = as_configured(config, problem)
                was = measured(name, number)
                tokens = config.train.batch_size * config.data.seq_len
                step = was["cpu_s"] * max(1.0, number / len(os.sched_getaffinity(0)))
                found.append(
                    {
                        "model": name,
                        "ranks": number,
                        "step ms": 1e3 * step,
                        "wall ms": 1e3 * tokens / was["median"],
                        "predicted ms": 1e3 * said.seconds.total_s,
                        "error": said.seconds.total_s / step - 1,
                        "MiB": was["bytes"] / 2**20,
                        "predicted MiB": said.memory.live_bytes / 2**20,
                        "memory error": said.memory.live_bytes / was["bytes"] - 1,
                    }
                )
                print(found[-1], file=sys.stderr, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    found = rows()
    errors = [abs(row["error"]) for row in found]
    memory = [abs(row["memory error"]) for row in found]
    print(markdown_table(found))
    print(f"\nmedian error of time {100 * median(errors):.0f} %, of memory {100 * median(memory):.0f} %")
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
