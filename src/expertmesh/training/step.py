"""One optimiser step: micro-batches forward and backward, clipping, update."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertmesh.config.run import RunConfig
from expertmesh.moe.random import key_noise
from expertmesh.parallel.team import Team
from expertmesh.training.metrics import Load, measure_load, to_lists
from expertmesh.training.objective import LoadCounter, routing_losses, token_losses
from expertmesh.training.optim import balance_experts
from expertmesh.training.precision import Precision


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        loss: mean cross-entropy per token in nats.
        aux_loss: weighted balance loss.
        z_loss: weighted router z-loss.
        grad_norm: before clipping.
        load: use of the experts.
        is_finite: whether loss and gradient were finite; if not, no parameter was changed.
    """

    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    load: Load
    is_finite: bool


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: tuple[Tensor, Tensor],
    *,
    step: int,
    config: RunConfig,
    precision: Precision,
    team: Team | None = None,
) -> StepResult:
    """Forward, backward, clip, update.

    The loss is normalised by the tokens of the whole batch, and router noise is keyed by the seed, the step and the
    token's place in the whole batch, so that micro-batches change nothing but rounding (and what a routing group of
    "all tokens of a call" means).

    Args:
        model: in training mode.
        optimizer: with the learning rate of this step.
        scaler: of the loss; may be switched off.
        batch: inputs and targets of all ranks, each (B, S) int64.
        step: from 0.
        config: of the run.
        precision: device and dtype.
        team: the ranks among which each micro-batch is split; None: this process alone.

    Returns:
        Losses and statistics; synchronises with the device.
    """
    team = Team() if team is None else team
    ids_BS, targets_BS = (t.to(precision.device, non_blocking=True) for t in batch)
    key_noise(model, seed=config.train.seed, step=step)
    optimizer.zero_grad(set_to_none=True)
    sums, counter = accumulate_gradients(
        model,
        ids_BS,
        targets_BS,
        micro_batch_size=config.train.micro_batch_size or len(ids_BS),
        scaler=scaler,
        precision=precision,
        team=team,
    )
    scaler.unscale_(optimizer)
    norm = team.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
    loss, aux_loss, z_loss, grad_norm = torch.cat((sums, norm.to(sums).reshape(1))).tolist()
    is_finite = all(map(math.isfinite, (loss, aux_loss, z_loss, grad_norm)))
    if is_finite:
        scaler.step(optimizer)
        balance_experts(model, counter.counts)
    scaler.update()
    num_dropped = 0 if counter.num_dropped is None else int(counter.num_dropped)
    load = measure_load(to_lists(counter.counts), num_dropped)
    return StepResult(loss, aux_loss, z_loss, grad_norm, load, is_finite)


def accumulate_gradients(
    model: nn.Module,
    ids_BS: Tensor,
    targets_BS: Tensor,
    *,
    micro_batch_size: int,
    scaler: torch.amp.GradScaler,
    precision: Precision,
    team: Team | None = None,
) -> tuple[Tensor, LoadCounter]:
    """Forward and backward over the micro-batches of a batch.

    Args:
        model: in training mode.
        ids_BS: (B, S) int64 inputs.
        targets_BS: (B, S) int64 targets.
        micro_batch_size: sequences per forward pass of all ranks.
        scaler: of the loss.
        precision: device and dtype.
        team: see `training_step`.

    Returns:
        (3,) loss, balance loss and z-loss of the batch, FP32 or FP64, and the routing counts. Does not synchronise.
    """
    B, S = ids_BS.shape
    team = Team() if team is None else team
    counter = LoadCounter.empty()
    sums = torch.zeros(3, device=ids_BS.device, dtype=precision.master_dtype)
    for start in range(0, B, micro_batch_size):
        stop = min(start + micro_batch_size, B)
        rows = team.rows(start, stop)
        team.announce_micro_batch(model, is_last=stop == B)
        token_index = torch.arange(rows.start * S, rows.stop * S, device=ids_BS.device)
        with precision.autocast():
            output = model(ids_BS[rows], token_index=token_index)
        targets = team.positions(targets_BS[rows])
        losses = token_losses(output.logits_BSV, targets, overwrite_logits=True)
        loss = losses.sum() / (B * S)
        share = targets.numel() / (B * S)
        aux_loss, z_loss = (part * share for part in routing_losses(output.stats, loss))
        scaler.scale(loss + aux_loss + z_loss).backward()
        counter.add(output.stats)
        sums += torch.stack((loss, aux_loss.to(loss), z_loss.to(loss))).detach()
    return team.sum_(sums, what="the losses"), counter
