"""One run after another, each kept as soon as it is finished, so that all of them can be stopped and started again."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.arms import Arm, Claim
from rich.console import Console

from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.config.run import RunConfig
from expertmesh.models.gpt.spec import count_parameters
from expertmesh.runs.open import LoadedModel, open_model
from expertmesh.runs.run_dir import Run, load_run
from expertmesh.training.evaluate import Evaluation, evaluate
from expertmesh.training.loop import train

PARTS = 20
"""Budgets are twentieths of the longest one; each begins its decay, the last fifth, after so many 25ths of it."""
TRUNK_PARTS = 25
MULTIPLE = PARTS * TRUNK_PARTS // 5
"""Of the longest run's steps, so that all of these are whole."""
SWEEP_SEED = 99
FACTORS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Job:
    """A run to be finished.

    Attributes:
        arm: its model.
        seed: of weights and order of data.
        part: its budget in twentieths of the longest.
        lr: peak rate.
        steps: optimizer steps.
        trunk: the run that it branches from; None: a run of its own.
        is_trunk: others branch from it.
    """

    arm: Arm
    seed: int
    part: int
    lr: float
    steps: int
    trunk: Path | None = None
    is_trunk: bool = False

    @property
    def key(self) -> str:
        """Unique among the runs of a claim."""
        return f"{self.arm.name}, seed {self.seed}, {self.part}/{PARTS}, rate {self.lr:g}, {self.steps} steps"


Measure = Callable[[RunConfig, Job], dict[str, Any]]
"""What a finished run is worth."""


def evaluated(
    config: RunConfig, *, max_samples: int | None = None
) -> tuple[Run, LoadedModel, Evaluation]:
    """A finished run, its model, and the model's evaluation.

    Args:
        config: of the run.
        max_samples: of validation; None: all.
    """
    run = load_run(config.train.run_dir)
    trained = open_model(run)
    found = evaluate(
        trained.task,
        trained.model,
        trained.task.prepare(),
        batch_size=config.train.batch_size,
        max_samples=max_samples,
        precision=trained.precision,
    )
    return run, trained, found


class Ledger:
    """The finished runs of a claim, as JSON.

    Args:
        path: of the file.
        about: what holds for all runs; kept with them, and equal to what is kept already. None: that which is kept.
    """

    def __init__(self, path: Path, about: dict[str, Any] | None) -> None:
        self.path = path
        self.about = about or {}
        self.runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            self.runs = kept["runs"]
            if about is None:
                self.about = kept["about"]
            elif kept["about"] != about:
                raise SystemExit(
                    f"{path}: holds runs of {kept['about']}, and these would be of {about}; give another --out"
                )

    def add(self, key: str, found: dict[str, Any]) -> None:
        """Keep a run's results, at once."""
        self.runs[key] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": self.about, "runs": self.runs}, indent=1)
        self.path.write_text(text + "\n")


class Runs:
    """Finishes the runs of a claim.

    Args:
        claim: what is asked.
        folder: of the run directories.
        ledger: of finished runs.
        measure: what is kept of each.
        changes: to every run, by dotted names.
        steps: of the longest run; None: as the claim's tokens per parameter say.
    """

    def __init__(
        self,
        claim: Claim,
        folder: Path,
        ledger: Ledger,
        measure: Measure,
        *,
        changes: dict[str, Any],
        steps: int | None = None,
    ) -> None:
        self.claim, self.folder, self.ledger, self.changes = claim, folder, ledger, changes
        self.measure = measure
        self.steps = steps or claim.steps or self._longest()

    def _longest(self) -> int:
        config = self.claim.arm(self.claim.base).configuration(self.changes)
        assert isinstance(config, GPTRunConfig)
        tokens = self.claim.tokens_per_parameter * count_parameters(config.model).active
        per_step = config.train.batch_size * config.data.seq_len
        return math.ceil(tokens / per_step / MULTIPLE) * MULTIPLE

    def steps_of(self, part: int) -> int:
        """Steps of a budget."""
        return self.steps * part // PARTS

    def sweep(self, arm: Arm) -> float:
        """The peak rate with the lowest finished loss at a quarter of the budget, on a seed that is not reported."""
        if not self.claim.sweeps:
            return arm.lr
        if arm.rate_of is not None:
            return self.sweep(self.claim.arm(arm.rate_of))
        quarter = PARTS // 4
        losses: dict[float, float] = {}

        def measure(lr: float) -> None:
            job = Job(arm, SWEEP_SEED, quarter, lr, self.steps_of(quarter))
            losses[lr] = self.finish(job)["loss"]

        for factor in FACTORS:
            measure(arm.lr * factor)
        for _ in range(2):  # the best one is not at the edge, or the sweep goes on there
            best = min(losses, key=losses.__getitem__)
            if best == max(losses):
                measure(best * 2)
            elif best == min(losses):
                measure(best / 2)
        return min(losses, key=losses.__getitem__)

    def jobs(self, arm: Arm, seed: int, lr: float) -> Iterator[Job]:
        """The reported runs of an arm: the longest one, then the branches that leave it."""
        steps = round(self.steps * arm.longer)
        others = [
            part for part in self.claim.parts if part != PARTS and arm.name in self.claim.ladder
        ]
        trunk = Job(arm, seed, PARTS, lr, steps, is_trunk=bool(others))
        yield trunk
        for part in others:
            yield Job(arm, seed, part, lr, self.steps_of(part), trunk=self.folder_of(trunk))

    def folder_of(self, job: Job) -> Path:
        """The run directory of a job."""
        digest = hashlib.sha256(job.key.encode()).hexdigest()[:10]
        name = job.arm.name.replace(" ", "_").replace(",", "").replace("/", "-")
        return self.folder / self.claim.name / f"{name}_{digest}"

    def configuration(self, job: Job) -> RunConfig:
        """The run of a job."""
        config = job.arm.configuration(self.changes)
        every = self.steps // TRUNK_PARTS if job.is_trunk else job.steps
        changes: dict[str, Any] = {
            "optim.lr": job.lr,
            "train.seed": job.seed,
            "train.steps": job.steps,
            "train.run_dir": str(self.folder_of(job)),
            "train.resume": "auto",
            "train.eval_every": job.steps,
            "train.checkpoint_every": every if job.is_trunk else max(1, job.steps // 4),
        }
        if job.is_trunk:
            changes["train.keep_every"] = every
        if job.trunk is not None:
            changes["train.branch_from"] = str(job.trunk)
        if job.arm.teacher is not None:
            teacher = Job(self.claim.arm(job.arm.teacher), job.seed, PARTS, job.lr, self.steps)
            changes["distill.teacher"] = str(self.folder_of(teacher))
            changes["distill.until"] = job.arm.until
        return config.updated(changes)

    def finish(self, job: Job) -> dict[str, Any]:
        """Results of a run, which is trained unless they are known."""
        if job.key in self.ledger.runs:
            return self.ledger.runs[job.key]
        config = self.configuration(job)
        began = time.process_time()
        result = train(config, recipe=self.claim.name, console=Console(quiet=True))
        if result.stopped_by is not None:
            raise SystemExit(f"stopped by {result.stopped_by.name}; start again to go on")
        seconds = time.process_time() - began
        found = self.measure(config, job)
        found |= {"arm": job.arm.name, "seed": job.seed, "part": job.part, "lr": job.lr}
        if result.resumed_from == 0:
            found["cpu_seconds"] = round(seconds, 1)
        self.ledger.add(job.key, found)
        print(f"{job.key}: {found['loss']:.4f} nats", flush=True)
        return found

    def tidy(self, arm: Arm, seed: int, lr: float) -> None:
        """Checkpoints go that no later run needs: all but the last of the longest run, which may be used further."""
        teachers = {a.teacher for a in self.claim.arms}
        if arm.name not in teachers:
            for job in self.jobs(arm, seed, lr):
                saved = sorted(self.folder_of(job).glob("checkpoints/step_*"))
                for folder in saved[:-1] if job.part == PARTS else saved:
                    shutil.rmtree(folder, ignore_errors=True)
