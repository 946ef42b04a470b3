"""The race on one GPU, in five calls of at most ten minutes that cannot outlast their time, 42 minutes in all.

    python -m benchmarks.race kernels OUT             # ceilings, tests, every kernel of four shapes: 8 minutes
    python -m benchmarks.race sweep OUT               # tiles: each GEMM alone, best and worst as OUT/tiles.json: 7.5
    python -m benchmarks.race peers OUT               # against the best there are: 9.5
    python -m benchmarks.race engine OUT              # steps of the engine beside vLLM's, two shapes of the layer: 9
    python -m benchmarks.race workloads OUT           # adapters beside peft, exact RL, narrow and paged experts: 8
    python -m benchmarks.race report OUT [OUT2 ...]   # the tables and the plot, from what came back
    python -m benchmarks.race kernels OUT --dry-run   # everything in tiny on a CPU, stand-ins for GPU packages

Every part runs in a process of its own that is killed at its limit; what it found is in OUT/CALL.json at once, its
output in OUT/CALL.log.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.race.budget import Budget
from benchmarks.race.calls import CALLS, Setting, plan
from benchmarks.race.parts import run_call
from benchmarks.race.report import load, predictions, short, write


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.race", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("call", choices=[*CALLS, "report"])
    parser.add_argument("out", type=Path, nargs="+", help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="*", default=(), help="these shapes only")
    parser.add_argument("--peers", nargs="*", default=(), help="these peers only, as in the tables")
    parser.add_argument("--only", nargs="*", default=(), help="parts whose names begin so")
    parser.add_argument("--sanitize", action="store_true", help="compute-sanitizer, in `kernels`")
    parser.add_argument("--budget-s", type=float, help="seconds of the whole call")
    parser.add_argument("--name", help="of the report's files; default: layer_GPU_YYYYMM")
    return parser.parse_args()


def main() -> int:
    """Run a call, or write the report; 1 if a part did not end well."""
    given = _arguments()
    if given.call == "report":
        print(write(given.out, name=given.name))
        return 0
    setting = Setting(
        device="cpu" if given.dry_run else given.device,
        dry=given.dry_run,
        sanitize=given.sanitize,
        shapes=tuple(given.shapes),
        peers=tuple(given.peers),
    )
    parts, budget_s = plan(given.call, setting)
    # from here on: a machine that has just started reads the imports below for half a minute
    budget = Budget(given.budget_s or budget_s)
    if given.only:
        parts = [p for p in parts if p.name == "machine" or p.name.startswith(tuple(given.only))]
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # once instead of in the fork of every part; none of them touches a GPU, or parts would get interpreters of their
    # own
    for module in ("torch._dynamo", "benchmarks.race.kernels", "benchmarks.race.train"):
        try:
            importlib.import_module(module)
        except Exception as error:  # of what a machine lacks: the parts that need it say so
            print(f"{module}: {type(error).__name__}: {error}", flush=True)

    (out,) = given.out

    def changed(record: dict) -> None:
        if given.call == "sweep":
            from benchmarks.race.sweep import write_tables

            write_tables(out / "tiles.json", record)
        if given.call == "kernels":
            (out / "predictions.md").write_text(predictions(load([out])))

    record = run_call(parts, name=given.call, out=out, budget=budget, changed=changed)
    print(short(load([out])))
    return int(any(outcome["state"] != "done" for outcome in record["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
