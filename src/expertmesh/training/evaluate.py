"""Evaluation of a model on validation samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor, nn

from expertmesh.data.data_progress import Progress
from expertmesh.models.task import Batch, Data, Part, Task, each_tensor, num_samples
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import Precision

Evaluation = dict[str, float]
"""Results of an evaluation by name, among them "loss" and the family's metric."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context for evaluation: eval mode without gradients; the previous mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def watched(data: Data) -> Callable[[Iterator[Batch]], Iterator[Batch]]:
    """`watch` argument of `evaluate` that reports progress, with the total if the data know it."""
    total: int | None = getattr(data, "num_validation", None)
    told = Progress("evaluated", total=total, unit="validation samples")
    return partial(told.over, size=num_samples)


def evaluate(
    task: Task,  # defines the measurement
    model: nn.Module,  # the model of the task
    data: Data,  # the data of the task
    *,
    batch_size: int,  # samples per forward pass of all ranks
    max_samples: int | None,  # maximum number of samples, evenly spread over the split; None: all
    precision: Precision,  # device and dtype
    ranks: Ranks | None = None,  # the ranks among which the samples are split; None: this process alone
    watch: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> Evaluation:
    """Measure a model on validation samples. Returns the evaluation; synchronizes with the device once."""
    ranks = Ranks() if ranks is None else ranks
    names: tuple[str, ...] = ()
    sums: Tensor | float = 0.0
    with evaluation_mode(model):
        for batch in watch(data.validation(max_samples, batch_size)):
            rows = ranks.rows(0, num_samples(batch))
            # A rank without a sample evaluates one that is not counted, to join the collectives.
            counts = rows.stop > rows.start
            rows = rows if counts else slice(0, 1)
            mine = each_tensor(task.cut(batch), itemgetter(rows))
            part = Part(0, rows, ranks, task.progress_items(mine) if task.measures_items else None)
            mine = each_tensor(mine, lambda t: t.to(precision.device, non_blocking=True))
            with precision.autocast():
                found = task.measure(model, mine, part)
            names = tuple(found)
            values = [on_device(value, precision.device) for value in found.values()]
            sums = sums + torch.stack(values) * counts
    assert isinstance(sums, Tensor), "validation data are never empty"
    totals = ranks.sum_(sums, what="the evaluation").tolist()
    return task.evaluation(dict(zip(names, totals, strict=True)))


def on_device(value: Tensor | float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """A sum as a tensor, without its gradient; a host number is filled in, because copying it would synchronize."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)
