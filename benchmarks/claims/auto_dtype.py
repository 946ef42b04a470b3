"""Does `--train.dtype auto` choose well? A training step in each type, beside what auto chose, on this processor and on lesser ones.

    python -m benchmarks.claims.auto_dtype                      # the demo's model, three sets of instructions
    python -m benchmarks.claims.auto_dtype --recipe gpt-moe-test --steps 4

Each pair of type and set of instructions is a process of its own (libraries read the variables when they load), the types of a set
take turns, and what counts is the median processor time of a step of one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown_table

INSTRUCTIONS: dict[str, dict[str, str]] = {
    "all": {},
    "AVX-512 without BF16": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
TYPES = ("float32", "bfloat16", "auto")
_WARM_UP = 2


class _StepTimes:
    """A tracker that keeps the processor time between steps."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def write(self, values: Mapping[str, float], experts: Any) -> None:
        """Note the time."""
        self.stamps.append(time.process_time())

    def median_s(self) -> float:
        """Of the steps after the first ones."""
        pairs = zip(self.stamps[_WARM_UP:], self.stamps[_WARM_UP + 1 :], strict=False)
        return statistics.median(after - before for before, after in pairs)


def one(recipe: str, dtype: str, steps: int, text: str, folder: str) -> dict[str, Any]:
    """Seconds of a step, and what the run computed in; in a process of its own."""
    import expertmesh as em
    from expertmesh.runs.arithmetic import read_arithmetic

    times, run_dir = _StepTimes(), Path(folder) / "run"
    config = em.recipe(recipe).updated(
        {
            "data.path": text,
            "data.cache_dir": str(Path(folder).parent / "cache"),
            "train.steps": steps,
            "train.eval_every": 10 * steps,
            "train.checkpoint_every": 10 * steps,
            "train.eval_batches": 1,
            "train.dtype": dtype,
            "train.run_dir": str(run_dir),
            "optim.warmup_steps": 1,
            "parallel.num_threads": 1,
        }
    )
    em.train(config, trackers=[times])
    chosen = read_arithmetic(run_dir / "arithmetic.json")
    names = [chosen.dtype, chosen.library] if chosen is not None else [dtype, ""]
    return {"step_s": times.median_s(), "computes_in": " ".join(names).strip()}


def compare(recipe: str, steps: int, rounds: int, text: str) -> list[dict[str, Any]]:
    """The table: a row per set of instructions."""
    rows = []
    with tempfile.TemporaryDirectory() as top:
        for name, variables in INSTRUCTIONS.items():
            found: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in TYPES}
            for number in range(rounds):
                for dtype in TYPES:
                    folder = Path(top) / f"{len(rows)}-{number}-{dtype}"
                    folder.mkdir()
                    words = [
                        "--one",
                        dtype,
                        "--recipe",
                        recipe,
                        "--steps",
                        str(steps),
                        "--text",
                        text,
                    ]
                    command = [sys.executable, "-m", "benchmarks.claims.auto_dtype", *words]
                    env = os.environ | variables | {"OMP_NUM_THREADS": "1"}
                    command += ["--folder", str(folder)]
                    printed = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
                    found[dtype].append(json.loads(printed.stdout.splitlines()[-1]))
            seconds = {dtype: min(f["step_s"] for f in found[dtype]) for dtype in TYPES}
            best = min(seconds["float32"], seconds["bfloat16"])
            chosen = sorted({f["computes_in"] for f in found["auto"]})
            rows.append(
                {
                    "instructions": name,
                    **{f"{dtype}_ms": round(1e3 * s, 1) for dtype, s in seconds.items()},
                    "auto_chose": " / ".join(chosen),
                    "auto_over_better": round(seconds["auto"] / best, 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="gpt-moe-demo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--text", default="src", help="a file or folder of text")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--one", choices=TYPES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.recipe, given.one, given.steps, given.text, given.folder)))
        return
    rows = compare(given.recipe, given.steps, given.rounds, given.text)
    print(markdown_table(rows))
    if given.output is not None:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
