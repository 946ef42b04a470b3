"""What every benchmark does the same way: check first, time interleaved, write Markdown and JSON with the
circumstances.

Times are those of `benchmarks.clock`, on CPUs `--clock wall` or `--clock cpu`.
"""

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from benchmarks.clock import Entry, Stopwatch
from benchmarks.markdown import markdown_table

from benchmarks import clock as clocks

Clock = Literal["wall", "cpu", "cuda"]

INTERESTING_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "sve",
    "bf16",
)


@dataclass(frozen=True)
class Contender:
    """One of the things compared.

    Attributes:
        name: as it appears in the table.
        run: what is timed.
        prepare: what comes before and is not timed (gradients set to None, the next batch); gets the round's number.
        slow: timed once, in the last round, without warm-up (baselines that take minutes).
    """

    name: str
    run: Callable[[], Any]
    prepare: Callable[[int], Any] = lambda _: None
    slow: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender over the rounds."""

    name: str
    median_s: float
    fastest_s: float
    rounds: int


class ResultsAreWrongError(Exception):
    """The correctness check before a benchmark failed; there is nothing to report."""


def checked(name: str, check: Callable[[], None]) -> None:
    """Run a check that raises AssertionError when results are wrong, and refuse to go on if it does.

    Raises:
        ResultsAreWrongError: with the check's message.
    """
    try:
        check()
    except AssertionError as error:
        raise ResultsAreWrongError(f"{name}: {error}; no timing is reported for wrong results") from error


def interleaved(
    contenders: Sequence[Contender], *, rounds: int, warmup: int = 1, clock: Clock = "wall"
) -> list[Timing]:
    """Time all contenders in turn, round by round, the first of the round changing.

    Args:
        contenders: at least one.
        rounds: timed rounds.
        warmup: rounds before, not timed.
        clock: wall time, CPU time of this thread (for runs with one thread), or events on the GPU.

    Returns:
        One timing per contender, in their order.
    """
    stopwatch = Stopwatch("cuda") if clock == "cuda" else Stopwatch(clock=clock)
    entries = [Entry(c.name, c.prepare, {c.name: c.run}, is_slow=c.slow) for c in contenders]
    found = clocks.interleaved(entries, stopwatch, rounds=rounds, warmup=warmup)
    samples = [found[c.name][c.name] for c in contenders]
    return [
        Timing(c.name, one.median_s, min(one.device_s), len(one.device_s))
        for c, one in zip(contenders, samples, strict=True)
    ]


_CLOCKS = {"wall": "wall", "cpu": "CPU time of one thread", "cuda": "CUDA events"}


def circumstances(*, clock: Clock, peers: dict[str, str] | None = None) -> dict[str, Any]:
    """Give hardware, versions, threads and clock of this run, in words that name no machine."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, **(peers or {})}
    return {
        "cpu": _cpu_description() + (f"; {torch.cuda.get_device_name()}" if clock == "cuda" else ""),
        "threads": torch.get_num_threads(),
        "clock": _CLOCKS[clock],
        "date": time.strftime("%Y-%m"),
        "versions": versions,
    }


def _cpu_description() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    flags = set(next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split())
    vendor = next((v for k, v in (("AuthenticAMD", "AMD"), ("GenuineIntel", "Intel")) if k in text), "")
    shown = ", ".join(flag for flag in INTERESTING_FLAGS if flag in flags)
    cores = text.count("processor\t") or "unknown"
    return " ".join(f"{vendor} {platform.machine()}, {cores} cores ({shown or 'no vector flags known'})".split())


def previous_rows(path: Path, around: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the rows of an earlier report at path (without suffix), if it came from the same circumstances; else
    none."""
    file = path.with_suffix(".json")
    if not file.exists():
        return []
    record = json.loads(file.read_text())
    return record["rows"] if record["circumstances"] == around else []


def write_report(
    path: Path,
    *,
    title: str,
    command: str,
    notes: Sequence[str],
    around: dict[str, Any],
    rows: Sequence[dict[str, Any]],
) -> None:
    """Write path.md and path.json.

    Args:
        path: without suffix.
        title: heading.
        command: how to run it again.
        notes: paragraphs between heading and table.
        around: from `circumstances`.
        rows: the table.
    """
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    text = [
        f"# {title}",
        f"`{command}`",
        f"{around['cpu']}; {around['threads']} thread(s); {around['clock']}; {versions}; {around['date']}.",
        *notes,
        markdown_table(rows),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    record = {"title": title, "command": command, "circumstances": around, "rows": list(rows)}
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n\n".join(text))
