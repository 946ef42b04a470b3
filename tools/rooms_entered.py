"""Count the modules that a call of the package enters, and how often it comes back to one that it had left.

    .venv/bin/python tools/rooms_entered.py [dry-run] [open] [train] [--list]

* dry-run: `expertmesh train gpt-moe-demo --dry-run`.
* open: `open_model` of a run folder.
* train: `train` of one step, from words to result.

A profile hook (`sys.setprofile`) sees every call of a Python function whose file is below `src/expertmesh`. Calls in a
row into one module count once. Modules are already imported: statements at their top level are not counted. Each line
has two counts: of the calls that are given the configuration, itself or inside another argument, and of all calls.
"""

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from expertmesh.config.run import RunConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT / 'src' / 'expertmesh'}{os.sep}"
TRAIN = [
    "train", "gpt-moe-test", "--train.steps", "1", "--train.no-tensorboard", "--train.device", "cpu",
    "--data.path", "corpus.txt", "--data.cache-dir", "cache", "--train.run-dir", "run",
]  # fmt: skip
DRY_RUN = ["train", "gpt-moe-demo", "--dry-run", "--train.device", "cpu"]


def holds_config(argument: object) -> bool:
    """Whether an argument is a configuration of a run, or has one as `config`, `task.config` or `run.config`."""
    held = [argument]
    for name in ("task", "run"):
        held += [getattr(one, "__dict__", {}).get(name) for one in held]
    held += [getattr(one, "__dict__", {}).get("config") for one in held]
    return any(isinstance(one, RunConfig) for one in held)


def in_a_row(modules: Iterable[str]) -> list[str]:
    """Modules with each row of the same one once."""
    found: list[str] = []
    for name in modules:
        if not found or found[-1] != name:
            found.append(name)
    return found


def modules_called(call: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Modules in the order in which calls enter them: of calls that are given the configuration, and of all."""
    given: list[str] = []
    every: list[str] = []

    def hook(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name == "<module>":
            return
        every.append(code.co_filename.removeprefix(PACKAGE))
        count = code.co_argcount + code.co_kwonlyargcount
        values = frame.f_locals
        if any(holds_config(values.get(name)) for name in code.co_varnames[:count]):
            given.append(every[-1])

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return in_a_row(given), in_a_row(every)


def run_words(words: list[str]) -> None:
    """Run the command line without its output."""
    from expertmesh.cli import main

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        if main.main(words):
            raise SystemExit(f"expertmesh {' '.join(words)} failed")


def dry_run() -> Callable[[], object]:
    """The dry run of the demonstration, its modules imported."""
    run_words(DRY_RUN)
    return lambda: run_words(DRY_RUN)


def opening() -> Callable[[], object]:
    """`open_model` of a run of one step, its modules imported."""
    from expertmesh.runs.open import open_model

    training()
    run_words(TRAIN)
    open_model("run")
    return lambda: open_model("run")


def training() -> Callable[[], object]:
    """A training of one step, its modules imported and its data in the cache."""
    Path("corpus.txt").write_text((ROOT / "docs" / "glossary.md").read_text() * 4)
    run_words(TRAIN)
    shutil.rmtree("run")
    return lambda: run_words(TRAIN)


CALLS = {"dry-run": dry_run, "open": opening, "train": training}


def main() -> None:
    """Print the counts of each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="*", help=f"of {', '.join(CALLS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="print every module with its entries")
    arguments = parser.parse_args()
    for name in arguments.calls or CALLS:
        with TemporaryDirectory() as folder:
            os.chdir(folder)
            both = modules_called(CALLS[name]())
            os.chdir(ROOT)
        for what, found in zip(("given the configuration", "all calls"), both, strict=True):
            entries = Counter(found)
            returns = len(found) - len(entries)
            print(f"{name:8} {what:24} {len(entries):4} modules {returns:6} returns")
            if arguments.list:
                for module, count in entries.most_common():
                    print(f"  {count:5} {module}")


if __name__ == "__main__":
    main()
