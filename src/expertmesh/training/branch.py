"""Branches of a trunk run: final losses at many budgets for little more than the cost of one run (Hu et al. 2024, 4.3).

A wsd schedule is constant until its decay, so runs of 1,000 and of 4,000 steps are identical until the first starts to
decay. The trunk is trained once; each branch starts from a checkpoint of it and does its own decay.
"""

import math
from operator import attrgetter
from pathlib import Path

from expertmesh.checkpoints.manifest import find_damage
from expertmesh.checkpoints.store import list_checkpoints, step_of
from expertmesh.config.run import OptimConfig, RunConfig
from expertmesh.errors import CheckpointError, ConfigError, named
from expertmesh.models.bound_files import check_run
from expertmesh.models.family import Family
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.metrics import read_metrics
from expertmesh.training.optim import decay_start, learning_rate
from expertmesh.training.state import RunProgress, read_run_state

_OF_THE_DECAY = frozenset({"schedule", "schedule_steps", "decay_fraction", "min_lr_ratio"})


def branch_point(config: RunConfig, *, family: Family) -> Path:
    """Checkpoint of the trunk at the step where a branch starts its decay."""
    trunk_dir = config.train.branch_from
    assert trunk_dir is not None
    option = named("train.branch_from", trunk_dir)
    folder = RunDir(trunk_dir)
    if not folder.path.is_dir():
        what = "is no folder" if folder.path.exists() else "does not exist"
        raise ConfigError(f"{option}: {what}; give the run directory of a trunk")
    trunk, _ = folder.read_config(family)
    fixed = [f"optim.{name}" for name in OptimConfig.model_fields if name not in _OF_THE_DECAY]
    for name in (*fixed, "train.batch_size", "train.freeze"):
        ours, theirs = attrgetter(name)(config), attrgetter(name)(trunk)
        if ours != theirs:
            raise ConfigError(
                name,
                ours,
                f"the trunk {trunk_dir} has {theirs}",
                "use that value, or train without a branch",
            )
    step = decay_start(total_steps=config.total_schedule_steps, config=config.optim)
    if trunk.optim.schedule != "wsd":
        raise ConfigError(
            f"{option}: has {named('optim.schedule', trunk.optim.schedule)}, whose rate is never constant; use a run "
            "with wsd"
        )
    latest = decay_start(total_steps=trunk.total_schedule_steps, config=trunk.optim)
    if step > latest:
        raise ConfigError(
            f"{option}: begins its own decay after step {latest}, and this run would leave it after step {step}; lower "
            f"{named('train.steps')}, or raise {named('optim.decay_fraction')}"
        )
    paths = {step_of(path): path for path in list_checkpoints(folder.checkpoints)}
    if step not in paths:
        kept = ", ".join(str(s) for s in paths if s <= latest) or "none"
        raise ConfigError(
            f"{option}: has no checkpoint of step {step}, where this run's decay begins (kept: {kept}); train the "
            f"trunk with {named('train.keep_every')}, or choose {named('train.steps')} and "
            f"{named('optim.decay_fraction')} so that {named('train.steps')} (1 - decay_fraction) is one"
        )
    if (problem := find_damage(paths[step])) is not None:
        raise CheckpointError(f"{option}: its checkpoint {paths[step]} is damaged ({problem})")
    values, _ = folder.read_values()
    check_run(folder.path, values, read_run_state(paths[step]), family, where=paths[step])
    _check_way(config, trunk, paths[step], folder)
    return paths[step]


def _check_way(config: RunConfig, trunk: RunConfig, path: Path, folder: RunDir) -> None:
    """Check that a trunk reached its checkpoint like a run of this configuration; it may have been resumed with other
    options."""
    step, total = step_of(path), config.total_schedule_steps
    fix = "leave it before, or train another trunk"
    option = named("train.branch_from", folder.path)
    for line in read_metrics(folder.metrics):
        ours = learning_rate(line["step"] - 1, total_steps=total, config=config.optim)
        theirs = line.get("lr") or ours
        if line["step"] <= step and not math.isclose(theirs, ours):
            raise ConfigError(
                f"{option}: had the rate {theirs:g} in step {line['step']}, where this run has {ours:g}; {fix}"
            )
    samples = RunProgress.saved(read_run_state(path)["progress"], where=path).samples
    if samples != step * config.train.batch_size:
        raise ConfigError(
            f"{option}: had seen {samples} samples after step {step}, not {step} x {config.train.batch_size} of "
            f"{named('train.batch_size')}; {fix}"
        )
    weights = [
        [run.distill.weight(done, total_steps=run.total_schedule_steps) for done in range(step)]
        for run in (config, trunk)
    ]
    if config.distill == trunk.distill and weights[0] != weights[1]:
        raise ConfigError(
            "distill.until",
            config.distill.until,
            f"is a share of {total} steps here and of {trunk.total_schedule_steps} in {folder.path}, so that "
            "distillation ends at another step",
            "use until=1 and decay=stop in both",
        )
