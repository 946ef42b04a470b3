"""Fine-tuning with adapters beside TRL and peft, side by side in one run: CPU time of a step, and peak memory above the
weights.

    python -m benchmarks.finetune_peers FOLDER [OBJECTIVE ...]

Each system is a process of its own with one thread; one step of each in turn, so that all meet the same machine. The
first step of each is warm-up. FOLDER keeps the model and what was measured: started again, objectives that are done are
not measured again. Results are written to docs/results/finetune_peers.md and .json.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.finetune_peers import work
from benchmarks.finetune_peers.page import write_page

ROUNDS = {"sft": 5, "dpo": 5, "grpo": 3}
NOT_EXACT = "expertmesh, not exact"
SYSTEMS = ("expertmesh", "TRL, grouped_mm", "TRL, eager")


class Side:
    """A process that makes a step whenever it is told to."""

    def __init__(self, system: str, objective: str, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.finetune_peers.sides"]
        with (folder / f"{objective} {system}.txt").open("w") as said:
            self.process = subprocess.Popen(
                [*command, system, objective, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.loaded = self._told()["loaded"]

    def step(self) -> dict[str, float]:
        """Make a step: CPU seconds, bytes at the peak, loss."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._told()

    def _told(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                found: dict[str, float] = json.loads(line[1:])
                return found
        raise SystemExit(f"a side ended with code {self.process.wait()}; its text is in the folder")

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def measured(objective: str, folder: Path) -> dict[str, Any]:
    """CPU seconds and peak memory of a step of an objective, by system."""
    names = (*SYSTEMS[:1], *((NOT_EXACT,) if objective == "grpo" else ()), *SYSTEMS[1:])
    sides = {name: Side(name, objective, folder) for name in names}
    try:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(1 + ROUNDS[objective]):
            for name in _turned(names, number):
                found[name].append(sides[name].step())
                print(objective, number, name, found[name][-1], flush=True)
    finally:
        for side in sides.values():
            side.end()
    return {
        name: {
            "cpu_s": statistics.median(one["cpu_s"] for one in steps[1:]),
            "all_cpu_s": [one["cpu_s"] for one in steps],
            "peak_bytes": max(one["peak"] for one in steps),
            "loss": [one["loss"] for one in steps],
        }
        for name, steps in found.items()
    }


def _turned(names: tuple[str, ...], number: int) -> Iterator[str]:
    """Names, another one first in every round."""
    at = number % len(names)
    yield from (*names[at:], *names[:at])


def main() -> None:
    """Measure what is missing, and write the page."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    work.make(folder)
    kept = folder / "measured.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for objective in sys.argv[2:] or work.OBJECTIVES:
        if objective not in found:
            found[objective] = measured(objective, folder)
            kept.write_text(json.dumps(found, indent=1))
    if set(found) == set(work.OBJECTIVES):
        write_page(found, folder / "model")


if __name__ == "__main__":
    main()
