"""The model of a run that has been trained, for whoever uses it: generation, reports, Python."""

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from expertmesh.models.family import Task
from expertmesh.training.checkpoint_tensors import tensor_dtypes
from expertmesh.training.precision import Precision, resolve_precision
from expertmesh.training.run_dir import Run
from expertmesh.training.state import load_weights


class Trained(NamedTuple):
    """A trained model in this process.

    Attributes:
        task: what trained it.
        model: in evaluation mode, with the weights of the run's newest good checkpoint, of the type that they have there.
        precision: what it computes in, and where; of weights in BF16 or FP16 that type.
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
    precision = _of_stored(run, precision)
    task: Task = run.family.open_task(run.config)
    model = task.build(device=precision.device, dtype=precision.master_dtype)
    load_weights(run.checkpoint, model)
    return Trained(task, model.eval(), precision)


def _of_stored(run: Run, precision: Precision) -> Precision:
    """The precision for weights as they are stored, but for routers and other tensors that are kept wider: a converted run has BF16 ones."""
    dtypes = tensor_dtypes(run.checkpoint).items()
    found = [
        dtype for name, dtype in dtypes if name.startswith("model.") and dtype.is_floating_point
    ]
    narrowest = min(found, key=lambda dtype: dtype.itemsize, default=precision.master_dtype)
    if narrowest.itemsize >= precision.master_dtype.itemsize:
        return precision
    return replace(precision, compute_dtype=narrowest, master_dtype=narrowest)
