"""Loss and gradients of the trainer's own step, for comparison with other trainers."""

import torch

from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.step import accumulate_gradients


def loss_of_step(task, model, batch, size, *, enriches=True):
    """Loss of a batch in micro-batches of a size, whose gradients stay in the model.

    Args:
        task: task of the run.
        model: the model.
        batch: samples on the CPU.
        size: samples of a micro-batch.
        enriches: whether the task still adds what it says of the batch.
    """
    model.zero_grad()
    sums, *_ = accumulate_gradients(
        task,
        model,
        task.enrich(model, batch, 0, Ranks()) if enriches else batch,
        step=0,
        micro_batch_size=size,
        scaler=torch.amp.GradScaler(enabled=False),
        precision=resolve_precision(task.config.train),
    )
    return float(sums[0])
