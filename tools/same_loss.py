"""Shows that a pure move left the training loss bitwise equal: trains the same small runs with two revisions and
compares.

    .venv/bin/python tools/same_loss.py REVISION            every case, REVISION against the working tree
    .venv/bin/python tools/same_loss.py REVISION --cases fp32 bf16

Losses, gradient norms and evaluations are compared as the numbers of metrics.jsonl, which are exact; times are left
out, and what only one of the two revisions writes is named.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ["--train.steps", "6", "--train.eval-every", "3", "--train.no-tensorboard"]
_SMALL = [
    "--model.dim", "64", "--model.num-layers", "2", "--model.num-heads", "2", "--model.vocab-size", "512",
    "--data.seq-len", "64", "--train.batch-size", "8", "--model.max-seq-len", "64",
]  # fmt: skip
FP32 = ["--train.dtype", "float32"]
BF16 = ["--train.dtype", "bfloat16"]
DROPS = ["--model.moe.capacity-factor", "1.0", "--model.moe.min-capacity", "1"]
CASES = {
    "fp32": (1, FP32),
    "bf16": (1, BF16),
    "fp64": (1, ["--train.dtype", "float64"]),
    "dense": (1, ["gpt-dense-demo", *_SMALL, *FP32]),
    "random-drops": (1, [*DROPS, *FP32]),
    "grouped-first": (
        1,
        [*DROPS, "--model.moe.drop-policy", "first", "--model.moe.routing-group-size", "64", *BF16],
    ),
    "sigmoid-bias": (
        1,
        ["--model.moe.score-function", "sigmoid", "--model.moe.bias-update-rate", "0.01", *FP32],
    ),
    "residual-shared": (
        1,
        ["--model.moe.residual", "--model.moe.num-shared-experts", "1", "--model.moe.top-k", "1", *BF16],
    ),
    "expert-choice": (1, ["--model.moe.router", "expert_choice", *FP32]),
    "cosine-recompute": (
        1,
        ["--model.moe.router", "cosine", "--model.moe.recompute-h", "--train.activation-checkpointing", *FP32],
    ),
    "wide": (
        1,
        ["--model.dim", "256", "--model.moe.hidden-dim", "512", "--model.moe.num-experts", "8", *BF16],
    ),
    "ranks-sliced": (2, ["--parallel.es-degree", "2", *FP32]),
    "ranks-zero1": (2, ["--parallel.zero-stage", "1", "--parallel.route-degree", "1", *BF16]),
    "ranks-tensor": (2, ["--parallel.tp-degree", "2", *FP32]),
}  # fmt: skip
TIMES = {"tokens_per_second", "seconds", "time"}


def losses(tree: Path, corpus: Path, ranks: int, options: list[str]) -> list[dict[str, float]]:
    """Train one case with the source of `tree`; returns the lines of metrics.jsonl without times."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [] if ranks == 1 else ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        places = [
            "--train.run-dir",
            f"{folder}/run",
            "--data.path",
            str(corpus),
            "--data.cache-dir",
            f"{folder}/cache",
        ]
        recipe, *options = options if options[0].startswith("gpt") else ["gpt-moe-test", *options]
        command = [
            sys.executable,
            "-m",
            *launcher,
            "expertmesh",
            "train",
            recipe,
            *STEPS,
            *places,
            *options,
        ]
        env = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


Lines = list[dict[str, float]]


def in_common(before: Lines, after: Lines) -> tuple[Lines, Lines, list[str]]:
    """Both with the names that both have, and the names that only one has; the loss must be in both."""
    left_out = {name for line in before for name in line} ^ {name for line in after for name in line}
    if "loss" in left_out:
        raise SystemExit("one of the two has no loss")
    before, after = (
        [{k: v for k, v in line.items() if k not in left_out} for line in lines] for lines in (before, after)
    )
    return before, after, sorted(left_out)


def main() -> int:
    """Compare; the exit status is the number of cases that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    arguments = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        old, corpus = Path(folder, "old"), Path(folder, "corpus.txt")
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(old), arguments.revision],
            cwd=ROOT,
            check=True,
        )
        try:
            text = "\n".join(p.read_text() for p in sorted((old / "docs").glob("*.md")))
            corpus.write_text(text[:120_000])
            for name in arguments.cases:
                ranks, options = CASES[name]
                before = losses(old, corpus, ranks, options)
                after = losses(ROOT, corpus, ranks, options)
                before, after, left_out = in_common(before, after)
                if same := before == after:
                    said = f"equal, last loss {after[-1]['loss']!r}"
                else:
                    said = f"DIFFERENT: {[(a, b) for a, b in zip(before, after, strict=False) if a != b][:1]}"
                said += f"; only one has {', '.join(left_out)}" if left_out else ""
                different += not same
                print(f"{name:20} {said}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    return different


if __name__ == "__main__":
    sys.exit(main())
