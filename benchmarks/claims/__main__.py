"""Claims measured on small models, one command each; every finished run is kept at once in docs/results/NAME.json.

    .venv/bin/python -m benchmarks.claims moe      # tokens and width that experts are worth
    .venv/bin/python -m benchmarks.claims moe-muon # the same with Muon in the place of AdamW
    .venv/bin/python -m benchmarks.claims prmoe    # pyramid-residual MoE
    .venv/bin/python -m benchmarks.claims mos      # Mixture-of-Students
    .venv/bin/python -m benchmarks.claims rts      # random token selection
    .venv/bin/python -m benchmarks.claims languages --data FOLDER    # translation; lohelp and multi30k below it
    .venv/bin/python -m benchmarks.claims languages-narrow --data FOLDER    # with more tokens per parameter
    .venv/bin/python -m benchmarks.claims inference    # trains nothing: what the models above cost to generate with

Stop them at any time; the same command goes on.
"""

import argparse
import platform
from pathlib import Path

import torch
from benchmarks.claims import inference, languages, pages, text
from benchmarks.claims.arms import CLAIMS, Arm, Claim
from benchmarks.claims.runs import Ledger, Runs

from expertmesh.training.heap import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("claim", choices=[*CLAIMS, *languages.CLAIMS, "inference"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="that are reported")
    parser.add_argument("--arms", nargs="+", help="names of models; default: all of the claim")
    parser.add_argument("--runs", type=Path, default=Path("runs/claims"), help="run directories")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="results")
    parser.add_argument("--steps", type=int, help="of the longest run; default: the claim's")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--dtype", default="float32", help="compute type of all runs")
    parser.add_argument(
        "--data", help="text, or the folder of parallel text; default: Python's standard library"
    )
    parser.add_argument("--page", action="store_true", help="write the page only; train nothing")
    options = parser.parse_args()
    if options.claim == "inference":
        inference.main()
        return
    keep_freed_memory()  # as the command line's trainings do
    is_of_text = options.claim in CLAIMS
    claim = {**CLAIMS, **languages.CLAIMS}[options.claim]
    measure, write_page = (
        (text.measure, pages.write_page)
        if is_of_text
        else (languages.measure, languages.write_page)
    )
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": options.threads,
        "dtype": options.dtype,
        "text": (options.data if is_of_text else None) or claim.text,
        "steps": options.steps,
    }
    ledger = Ledger(options.out / f"{claim.name}.json", None if options.page else about)
    changes = {"train.dtype": options.dtype, "parallel.num_threads": options.threads}
    if not (is_of_text or options.data or options.page):
        parser.error("--data: the folder of lohelp and multi30k is not given; name it")
    known = [arm.name for arm in claim.arms]
    if unknown := [name for name in options.arms or () if name not in known]:
        parser.error(f"--arms: {claim.name} has no {unknown[0]!r}; it has {', '.join(map(repr, known))}")
    if options.data is not None:
        changes |= {"data.path": options.data} if is_of_text else languages.folders(options.data)
    if not options.page:
        runs = Runs(claim, options.runs, ledger, measure, changes=changes, steps=options.steps)
        for seed, arm in in_order(claim, options.seeds):
            if options.arms and arm.name not in options.arms:
                continue
            rate = runs.sweep(arm)
            for job in runs.jobs(arm, seed, rate):
                runs.finish(job)
                write_page(claim, ledger, options.out)
            runs.tidy(arm, seed, rate)
    write_page(claim, ledger, options.out)


def in_order(claim: Claim, seeds: list[int]) -> list[tuple[int, Arm]]:
    """What runs: seed after seed, teachers before their students, and at the end the arms that run with one seed only."""
    pairs = [
        (seed, arm)
        for seed in seeds
        for arm in sorted(claim.arms, key=lambda arm: arm.teacher is not None)
        if seed == seeds[0] or arm.name not in claim.single
    ]
    return sorted(pairs, key=lambda pair: pair[1].name in claim.single)


if __name__ == "__main__":
    main()
