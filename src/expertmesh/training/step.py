"""Optimizer step: forward and backward over micro-batches, gradient clipping, update."""

import math
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor, nn

from expertmesh.models.task import Batch, Part, Task, each_tensor, num_samples
from expertmesh.moe.batch_balance import BatchBalance
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import Precision
from expertmesh.training.expert_use import ExpertUse, is_recorded, use_of_experts
from expertmesh.training.metrics import Load, measure_load
from expertmesh.training.optim import balance_experts
from expertmesh.training.routing_losses import LoadCounter, Watched, routing_losses


@dataclass(frozen=True)
class StepResult:
    """Losses and statistics of one step.

    Attributes:
        loss: mean over the items of the batch.
        aux_loss: weighted balance loss.
        z_loss: weighted router z-loss.
        grad_norm: gradient norm before clipping.
        load: load of the experts; None for a dense model.
        is_finite: whether loss and gradient were finite; if not, no parameter was changed.
        experts: use of each expert, in recorded steps; None in other steps, and for a dense model.
    """

    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    load: Load | None
    is_finite: bool
    experts: ExpertUse | None = None


def training_step(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: Batch,
    *,
    step: int,
    precision: Precision,
    ranks: Ranks | None = None,
) -> StepResult:
    """Forward, backward, clip, update.

    The loss is normalised by the items of the whole batch, and router noise is keyed by seed, step and the token's
    index in the whole batch. The micro-batch size therefore changes rounding only (and routing groups that are "all
    tokens of a call").

    Args:
        task: defines the loss, and holds the run's configuration.
        model: in training mode.
        optimizer: the optimizer, with the learning rate of this step.
        scaler: loss scaler; may be disabled.
        batch: samples of all ranks, on the CPU.
        step: from 0.
        precision: device and dtype.
        ranks: the ranks among which each micro-batch is split; None: this process alone.

    Returns:
        Losses and statistics; synchronises with the device.
    """
    config, ranks = task.config, Ranks() if ranks is None else ranks
    key_noise(model, seed=config.train.seed, step=step)
    optimizer.zero_grad(set_to_none=True)
    sums, counter = accumulate_gradients(
        task,
        model,
        batch,
        step=step,
        micro_batch_size=min(config.train.samples_per_pass, num_samples(batch)),
        scaler=scaler,
        precision=precision,
        ranks=ranks,
        watch=is_recorded(step, config.train.steps),
    )
    scaler.unscale_(optimizer)
    norm = ranks.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
    loss, aux_loss, z_loss, grad_norm = torch.cat((sums, norm.to(sums).reshape(1))).tolist()
    # read before the update, so that the host does not wait for it as well
    counts = [counts_E.tolist() for counts_E in counter.counts]
    dropped = [] if counter.num_dropped is None else counter.num_dropped.tolist()
    is_finite = all(map(math.isfinite, (loss, aux_loss, z_loss, grad_norm)))
    if is_finite:
        scaler.step(optimizer)
        # the balancing bias is part of the router
        if "router" not in config.train.freeze and not config.adapter.routers_rest:
            balance_experts(model, counter.counts)
    scaler.update()
    load = measure_load(counts, sum(dropped))
    experts = None
    if counter.watched:
        sums = ranks.sum_(torch.cat(counter.watched), what="the use of the experts")
        experts = use_of_experts(counts, dropped, sums.tolist(), task.labels)
    return StepResult(loss, aux_loss, z_loss, grad_norm, load, is_finite, experts)


def accumulate_gradients(
    task: Task,
    model: nn.Module,
    batch: Batch,
    *,
    step: int,
    micro_batch_size: int,
    scaler: torch.amp.GradScaler,
    precision: Precision,
    ranks: Ranks | None = None,
    watch: bool = False,
) -> tuple[Tensor, LoadCounter]:
    """Forward and backward over the micro-batches of a batch.

    Args:
        task: defines the loss.
        model: in training mode.
        batch: samples of all ranks, on the CPU.
        step: from 0.
        micro_batch_size: samples per forward pass of all ranks.
        scaler: loss scaler.
        precision: device and dtype.
        ranks: see `training_step`.
        watch: whether to sum the statistics of `ExpertUse` as well.

    Returns:
        (3,) loss, balance loss and z-loss of the batch, FP32 or FP64, and the routing counts. Does not synchronise.
    """
    ranks = Ranks() if ranks is None else ranks
    size, num_items = num_samples(batch), task.num_items(batch)
    num_routed = task.num_routed(batch, Ranks())
    counter = LoadCounter()
    sums = torch.zeros(3, device=precision.device, dtype=precision.master_dtype)
    with BatchBalance(model) as balance:
        for start in range(0, size, micro_batch_size):
            stop = min(start + micro_batch_size, size)
            rows = ranks.rows(start, stop)
            ranks.announce_micro_batch(model, is_last=stop == size)
            together = task.cut(each_tensor(batch, itemgetter(slice(start, stop))))
            mine = each_tensor(together, itemgetter(slice(rows.start - start, rows.stop - start)))
            num_mine = task.num_items(mine)
            pairs = zip(task.num_routed(mine, ranks), num_routed, strict=True)
            shares = [part / whole for part, whole in pairs]
            mine = each_tensor(mine, lambda t: t.to(precision.device, non_blocking=True))
            with precision.autocast():
                found = task.loss(model, mine, Part(step, rows, ranks, num_mine))
            loss = found.total / num_items
            stats = () if task.config.adapter.routers_rest else found.stats
            aux_loss, z_loss = routing_losses(stats, loss, shares)
            scaler.scale(loss + aux_loss + z_loss).backward()
            balance.add(found.stats)
            counter.add(found.stats, _watched(task, mine, ranks) if watch else None)
            sums += torch.stack((loss, aux_loss.to(loss), z_loss.to(loss))).detach()
    return ranks.sum_(sums, what="the losses"), counter


def _watched(task: Task, batch: Batch, ranks: Ranks) -> Watched:
    """Description of this rank's samples for `LoadCounter`."""
    tp, count = ranks.tp_degree, len(task.labels)
    label_B = task.label_of(batch) if count else None
    return Watched(num_samples(batch), ranks.position % tp, tp, count, label_B)
