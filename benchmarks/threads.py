"""Is the number of threads that the command line takes by itself a good one? On a busy machine and on a quiet one.

    python -m benchmarks.threads                        # as the machine is, and with a busy loop on each core
    python -m benchmarks.threads --rounds 7 --what decode

Training (`gpt-moe-test`, and some steps of `gpt-moe-demo`) and decoding (greedy, by a model of `gpt-moe-demo` after two
steps), each as a command of its own: by default, and with every number of threads set by hand (OMP_NUM_THREADS, which
also has the default's way of waiting). The commands take turns, so that what else runs on the machine meets all of
them. Tokens per second are those that the program prints, or of decoding the tokens of the whole command without what a
command of one token for each prompt takes. Each number is printed when it is there, and a table that has had its
minutes begins no other round.

What it checks: with a busy loop on each core the default is at least 0.8 x the best number; else it takes the number
with the best median, or one whose median lies within the spread of the best.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
LEAST = 0.8
_PROMPTS, _TOKENS = 8, 100
"""Prompts of a command, one after another, and tokens of an answer: seconds of decoding, beside which those of the
start are few."""


def command(*words: str, threads: int | None) -> str:
    """What a command of expertmesh prints, on both streams."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(
        [sys.executable, "-m", "expertmesh", *words],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def train(folder: Path, recipe: str, steps: int, threads: int | None) -> tuple[float, str]:
    """Tokens per second of a new run, and what it says of its threads."""
    run = folder / f"{recipe}-{time.monotonic_ns()}"
    said = command(
        *(
            "train",
            recipe,
            "--data.path",
            str(folder / "text.txt"),
            "--data.cache-dir",
            str(folder / "cache"),
        ),
        *("--train.steps", str(steps), "--train.run-dir", str(run), "--train.tensorboard", "false"),
        *("--train.dtype", "float32", "--train.eval-batches", "1", "--train.device", "cpu"),
        threads=threads,
    )
    (rate,) = re.findall(r"\(([\d,]+) tokens/s\)", said)
    (found,) = re.findall(r"(\d+) threads? \(", said)
    newest = folder / f"run-{recipe}"
    newest.unlink(missing_ok=True)
    newest.symlink_to(run)
    return float(rate.replace(",", "")), found


def decode(folder: Path, recipe: str, threads: int | None) -> tuple[float, str]:
    """Tokens per second of greedy decoding, beyond the first."""
    seconds = []
    for count in (1, _TOKENS):
        began = time.perf_counter()
        command(
            *(
                "generate",
                "--run",
                str(folder / f"run-{recipe}"),
                "--greedy",
                *("--max-tokens", str(count), "--batch-size", "1"),
                *["the quick"] * _PROMPTS,
            ),
            threads=threads,
        )
        seconds.append(time.perf_counter() - began)
    return _PROMPTS * (_TOKENS - 1) / max(seconds[1] - seconds[0], 1e-9), "?"


@contextmanager
def busy(number: int) -> Iterator[None]:
    """A busy loop on each core."""
    cores = sorted(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", SPIN, str(core)]) for core in cores for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Prints a table for each kind of work and each state of the machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--what", choices=["test", "demo", "decode"], nargs="+", default=["test", "demo", "decode"])
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1], help="busy loops on each core")
    parser.add_argument("--steps", type=int, default=60, help="of gpt-moe-test")
    parser.add_argument("--demo-steps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=4, help="of each table, after which no round begins")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    numbers = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < cores] + [cores]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "text.txt").write_text(
            "".join(f"the quick brown fox number {i} jumps over {7 * i} dogs\n" for i in range(60_000))
        )
        work = {
            "test": lambda n: train(folder, "gpt-moe-test", options.steps, n),
            "demo": lambda n: train(folder, "gpt-moe-demo", options.demo_steps, n),
            "decode": lambda n: decode(folder, "gpt-moe-demo", n),
        }
        for recipe in ("gpt-moe-test", "gpt-moe-demo"):  # caches of tokens, and a run to decode
            train(folder, recipe, 2, 1)
        for loops in options.loops:
            with busy(loops):
                for what in options.what:
                    print(f"\n{what}, {loops} busy loops per core", flush=True)
                    measure(work[what], numbers, options.rounds, options.minutes, loops)


def name(number: int | None) -> str:
    """Of a number of threads in a table."""
    return "default" if number is None else str(number)


def measure(work, numbers, rounds, minutes, loops) -> None:
    """One table, and each of its numbers as soon as it is there."""
    rates: dict[int | None, list[float]] = {n: [] for n in (None, *numbers)}
    taken: list[str] = []
    began = time.monotonic()
    while len(taken) < rounds and (not taken or time.monotonic() - began < 60 * minutes):
        print(f"  round {len(taken) + 1}, load {os.getloadavg()[0]:.1f}:", end="", flush=True)
        for n in rates:
            rate, found = work(n)
            rates[n].append(rate)
            if n is None:
                taken.append(found)
            print(f" {name(n)} {rate:,.1f}", end="", flush=True)
        print(flush=True)
    print(f"  {len(taken)} rounds by turns; default took {', '.join(taken)} threads")
    best = max(numbers, key=lambda n: median(rates[n]))
    for n, found in rates.items():
        spread = f"({min(found):,.1f} to {max(found):,.1f})"
        print(f"  {name(n):>7}  {median(found):10,.1f} tokens/s  {spread}")
    ratio = median(rates[None]) / median(rates[best])
    print(
        f"  default / best ({best}): {ratio:.2f}" + (f", at least {LEAST}: {ratio >= LEAST}" if loops else ""),
        flush=True,
    )
    if not loops and "?" not in taken:
        spread = min(rates[best])
        good = all(int(n) == best or median(rates[int(n)]) >= spread for n in taken)
        print(f"  the number taken has the best median, or one within its spread: {good}", flush=True)


if __name__ == "__main__":
    main()
