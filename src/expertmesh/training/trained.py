"""The model of a run that has been trained, for whoever uses it: generation, reports, Python."""

from typing import NamedTuple

from torch import nn

from expertmesh.models.family import Task
from expertmesh.training.precision import Precision, resolve_precision
from expertmesh.training.run_dir import Run
from expertmesh.training.state import load_weights


class Trained(NamedTuple):
    """A trained model in this process.

    Attributes:
        task: what trained it.
        model: in evaluation mode, with the weights of the run's newest good checkpoint.
        precision: what it computes in, and where.
    """

    task: Task
    model: nn.Module
    precision: Precision


def open_trained(run: Run, *, precision: Precision | None = None) -> Trained:
    """Build the model of a run and load its weights.

    Args:
        run: of `load_run`.
        precision: what to compute in; None: what the run's configuration says here.

    Raises:
        ConfigError: the run's device or type is not to be had here.
        CheckpointError: the checkpoint is damaged.
    """
    if precision is None:
        precision = resolve_precision(run.config.train, record=run.arithmetic)
    task: Task = run.family.open_task(run.config)
    model = task.build(device=precision.device, dtype=precision.master_dtype)
    load_weights(run.checkpoint, model)
    return Trained(task, model.eval(), precision)
