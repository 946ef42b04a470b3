"""Validation loss and bits per byte."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertmesh.parallel.team import Team
from expertmesh.training.loader import Windows
from expertmesh.training.objective import token_losses
from expertmesh.training.precision import Precision


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts text.

    Attributes:
        loss: mean cross-entropy per token in nats.
        bits_per_byte: total cross-entropy in bits over the bytes of the predicted text. The end-of-text token costs
            bits and has no bytes, so the number is an upper bound on that of the text alone.
        num_tokens: tokens predicted.
        num_bytes: bytes they stand for.
    """

    loss: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the mode before is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def evaluate(
    model: nn.Module,
    windows: Windows,
    token_num_bytes_V: Tensor,
    *,
    batch_size: int,
    max_samples: int | None,
    precision: Precision,
    team: Team | None = None,
) -> Evaluation:
    """Predict validation windows, each from its own beginning.

    Args:
        model: maps ids (B, S) to an output with `logits_BSV`.
        windows: of the validation split.
        token_num_bytes_V: (V,) int64 bytes per token, on the CPU.
        batch_size: windows per forward pass of all ranks.
        max_samples: so many windows, evenly spread over the split; None: all.
        precision: device and dtype.
        team: the ranks among which the windows are split; None: this process alone.

    Returns:
        The evaluation; synchronises with the device once.
    """
    chosen = windows.spread(windows.num_windows if max_samples is None else max_samples)
    team = Team() if team is None else team
    nats = torch.zeros((), dtype=torch.float64, device=precision.device)
    num_tokens = num_bytes = 0
    with evaluation_mode(model):
        for start in range(0, len(chosen), batch_size):
            ids_BS, targets_BS = windows.windows(chosen[start : start + batch_size])
            num_tokens += targets_BS.numel()
            num_bytes += int(token_num_bytes_V[targets_BS].sum())
            rows = team.rows(0, len(ids_BS))
            # A rank without a window joins the others with one that does not count.
            ids, targets = (
                t[rows if rows.stop > rows.start else slice(1)] for t in (ids_BS, targets_BS)
            )
            with precision.autocast():
                logits_BSV = model(ids.to(precision.device)).logits_BSV
            losses = token_losses(logits_BSV, team.positions(targets).to(precision.device))
            nats += losses.sum().double() * (rows.stop > rows.start)
    total = float(team.sum_(nats, what="the evaluation"))
    return Evaluation(total / num_tokens, bits_per_byte(total, num_bytes), num_tokens, num_bytes)


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """nats / ln 2 / bytes; NaN for no bytes."""
    return nats / math.log(2) / num_bytes if num_bytes else math.nan
