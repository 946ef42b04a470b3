"""Optimizer step: forward and backward over micro-batches, gradient clipping, update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from expertmesh.models.task import Batch, Part, Task, each_tensor, micro_batches, num_samples
from expertmesh.moe.batch_balance import BatchBalance
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import Precision
from expertmesh.training.evaluate import on_device
from expertmesh.training.expert_use import ExpertUse, is_recorded, use_of_experts
from expertmesh.training.metrics import Load, measure_load
from expertmesh.training.optim import balance_experts
from expertmesh.training.routing_losses import LoadCounter, Watched, routing_losses


@dataclass(frozen=True)
class StepResult:
    """Losses and statistics of one step."""

    loss: float  # mean over the items of the batch
    aux_loss: float  # weighted balance loss
    z_loss: float  # weighted router z-loss
    grad_norm: float  # gradient norm before clipping
    load: Load | None  # load of the experts; None for a dense model
    is_finite: bool  # whether loss and gradient were finite; if not, no parameter was changed
    items: int  # items of the batch, for progress
    measures: Mapping[str, float]  # measures of the task's loss by name
    # use of each expert, in recorded steps; None in other steps, and for a dense model
    experts: ExpertUse | None = None


def training_step(
    task: Task,  # defines the loss, and holds the run's configuration
    model: nn.Module,  # in training mode
    optimizer: torch.optim.Optimizer,  # the optimizer, with the learning rate of this step
    scaler: torch.amp.GradScaler,  # loss scaler; may be disabled
    batch: Batch,  # samples of all ranks, on the CPU
    *,
    step: int,  # from 0
    precision: Precision,  # device and dtype
    ranks: Ranks | None = None,  # the ranks among which each micro-batch is split; None: this process alone
) -> StepResult:
    """Forward, backward, clip, update.

    The loss is normalised by the items of the whole batch, and router noise is keyed by seed, step and the token's
    index in the whole batch. The micro-batch size therefore changes rounding only (and routing groups that are "all
    tokens of a call").

    Returns:
        Losses and statistics; synchronises with the device.
    """
    config, ranks = task.config, Ranks() if ranks is None else ranks
    key_noise(model, seed=config.train.seed, step=step)
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad(), precision.autocast():
        batch = task.enrich(model, batch, step, ranks)
    size, count = num_samples(batch), task.num_updates
    found = [
        _update(
            task,
            model,
            optimizer,
            scaler,
            each_tensor(batch, itemgetter(slice(size * i // count, size * (i + 1) // count))),
            step=step,
            precision=precision,
            ranks=ranks,
        )
        for i in range(count)
    ]
    results = [result for result, _ in found]
    measures: dict[str, float] = {}
    if found[0][1]:
        measures = task.evaluation({k: sum(sums[k] for _, sums in found) for k in found[0][1]})
        measures.pop("loss", None)  # which is in the result
    losses = ("loss", "aux_loss", "z_loss", "grad_norm")
    return replace(
        results[-1],
        **{name: sum(getattr(one, name) for one in results) / count for name in losses},
        is_finite=all(one.is_finite for one in results),
        items=task.progress_items(batch),
        measures=measures,
    )


def _update(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: Batch,
    *,
    step: int,
    precision: Precision,
    ranks: Ranks,
) -> tuple[StepResult, dict[str, float]]:
    """An update with an enriched batch, and its `Loss.sums`; arguments as in `training_step`."""
    config = task.config
    optimizer.zero_grad(set_to_none=True)
    sums, counter, named = accumulate_gradients(
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
    found = torch.cat((norm.to(sums).reshape(1), sums)).tolist()
    grad_norm, loss, aux_loss, z_loss, *more = found
    # read before the update, so that the host does not wait for it as well
    counts = [counts_E.tolist() for counts_E in counter.counts]
    dropped = [] if counter.num_dropped is None else counter.num_dropped.tolist()
    is_finite = all(map(math.isfinite, (loss, aux_loss, z_loss, grad_norm)))
    if is_finite:
        scaler.step(optimizer)
        # the balancing bias is part of the router
        if not config.routers_rest:
            balance_experts(model, counter.counts)
    scaler.update()
    load = measure_load(counts, sum(dropped))
    experts = None
    if counter.watched:
        sums = ranks.sum_(torch.cat(counter.watched), what="the use of the experts")
        experts = use_of_experts(counts, dropped, sums.tolist(), task.labels)
    result = StepResult(loss, aux_loss, z_loss, grad_norm, load, is_finite, 0, {}, experts)
    return result, dict(zip(named, more, strict=True))


def accumulate_gradients(
    task: Task,  # defines the loss
    model: nn.Module,  # in training mode
    batch: Batch,  # samples of all ranks, enriched, on the CPU
    *,
    step: int,  # from 0
    micro_batch_size: int,  # samples per forward pass of all ranks
    scaler: torch.amp.GradScaler,  # loss scaler
    precision: Precision,  # device and dtype
    ranks: Ranks | None = None,  # see `training_step`
    watch: bool = False,  # whether to sum the statistics of `ExpertUse` as well
) -> tuple[Tensor, LoadCounter, tuple[str, ...]]:
    """Forward and backward over the micro-batches of a batch.

    Returns:
        (3 + N,) loss, balance loss and z-loss of the batch, then `Loss.sums`, FP32 or FP64; the routing counts; and the
        names of the N sums. Does not synchronise.
    """
    ranks = Ranks() if ranks is None else ranks
    size, num_items = num_samples(batch), task.num_items(batch)
    num_routed = task.num_routed(batch, Ranks())
    counter = LoadCounter()
    sums: Tensor | float = 0.0
    where = precision.device, precision.master_dtype
    named: tuple[str, ...] = ()
    with BatchBalance(model) as balance:
        count = -(-size // micro_batch_size)
        parts = micro_batches(task, batch, micro_batch_size, ranks)
        for number, (rows, mine) in enumerate(parts, 1):
            ranks.announce_micro_batch(model, is_last=number == count)
            num_mine = task.progress_items(mine)
            pairs = zip(task.num_routed(mine, ranks), num_routed, strict=True)
            shares = [part / whole for part, whole in pairs]
            mine = each_tensor(mine, lambda t: t.to(precision.device, non_blocking=True))
            with precision.autocast():
                found = task.loss(model, mine, Part(step, rows, ranks, num_mine))
            loss = found.total / num_items
            stats = () if task.config.routers_rest else found.stats
            aux_loss, z_loss = routing_losses(stats, loss, shares)
            scaler.scale(loss + aux_loss + z_loss).backward()
            balance.add(found.stats)
            counter.add(found.stats, _watched(task, mine, ranks) if watch else None)
            named = tuple(found.sums)
            values = loss, aux_loss, z_loss, *found.sums.values()
            sums = sums + torch.stack([on_device(value, *where) for value in values])
    assert isinstance(sums, Tensor), "a batch is never empty"
    return ranks.sum_(sums, what="the losses"), counter, named


def _watched(task: Task, batch: Batch, ranks: Ranks) -> Watched:
    """Description of this rank's samples for `LoadCounter`."""
    tp, count = ranks.tp_degree, len(task.labels)
    label_B = task.label_of(batch) if count else None
    return Watched(num_samples(batch), ranks.position % tp, tp, count, label_B)
