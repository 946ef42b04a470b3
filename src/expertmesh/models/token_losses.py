"""Cross-entropy of the next token for language models."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.ops.dtypes import accumulate_dtype

# blocks of 1 MiB in FP32 fit into a core's L2 cache; on a GPU larger blocks save launches
_BLOCK_ELEMENTS_CPU = 1 << 18
_BLOCK_ELEMENTS_GPU = 1 << 28


class DistillTargets(NamedTuple):
    """Teacher logits for the same tokens, and weight and temperature of distillation."""

    logits_BSV: Tensor  # (B, S, V) teacher logits, any floating dtype, without gradient
    weight: float  # beta, weight of the KL divergence that is added to the loss
    temperature: float  # T, temperature of both softmaxes


def token_losses(
    logits_BSV: Tensor,  # (B, S, V), or (T, V), any floating dtype
    targets_BS: Tensor,  # (B, S), or (T,), int64
    *,
    label_smoothing: float = 0.0,  # s, in [0, 1)
    distill: DistillTargets | None = None,  # teacher logits; None: no distillation
    overwrite_logits: bool = False,
) -> Tensor:
    """Cross-entropy of every token in nats: log sum_v exp(z_v) - z_target.

    With label smoothing s, z_target becomes (1 - s) z_target + s mean_v z_v (Szegedy et al. 2016, section 7). With
    teacher logits t, beta T^2 KL(softmax(t / T) || softmax(z / T)) is added (Hinton et al. 2015, section 2).

    Forward and backward compute in FP32 (FP64 for FP64 logits) over blocks of rows. No FP32 copy of all logits is made,
    and on a CPU the rows stay in its cache.

    Args:
        overwrite_logits: whether the backward pass writes the gradient into the memory of the logits, which must not be
            used afterwards. This saves the largest tensor of a small model's step, and memory just read is fast to
            write.

    Returns:
        (B * S,) FP32 or FP64, differentiable once. Does not synchronise.
    """
    flat = logits_BSV.flatten(0, -2), targets_BS.flatten()
    if distill is not None:
        distill = distill._replace(logits_BSV=distill.logits_BSV.detach().flatten(0, -2))
    losses: Tensor = _CrossEntropy.apply(*flat, label_smoothing, distill, overwrite_logits)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that saves the logits and recomputes the softmax in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        smoothing: float,
        distill: DistillTargets | None,
        overwrite: bool,
    ) -> Tensor:
        ctx.save_for_backward(logits_TV, targets_T, *([] if distill is None else distill[:1]))
        ctx.smoothing, ctx.distill, ctx.overwrite = smoothing, distill and distill[1:], overwrite
        return row_losses(logits_TV, targets_T, smoothing, distill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_TV, targets_T, *teacher = ctx.saved_tensors
        grad_TV = logits_TV.detach() if ctx.overwrite else torch.empty_like(logits_TV)
        distill = DistillTargets(teacher[0], *ctx.distill) if teacher else None
        write_gradient(logits_TV, targets_T, grad_T, ctx.smoothing, distill, out_TV=grad_TV)
        return grad_TV, None, None, None, None


def row_losses(
    logits_TV: Tensor,
    targets_T: Tensor,
    smoothing: float = 0.0,
    distill: DistillTargets | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Losses (T,) of `token_losses` for logits / temperature, not seen by autograd."""
    dtype = accumulate_dtype(logits_TV.dtype)
    losses_T = torch.empty(len(logits_TV), dtype=dtype, device=logits_TV.device)
    for rows in _row_blocks(logits_TV):
        # twice as fast on a CPU as a sum of exponentials: one pass over each row
        logp = torch.log_softmax(_tempered(logits_TV[rows], dtype, temperature), dim=1)
        torch.neg(logp.gather(1, targets_T[rows, None]).squeeze(1), out=losses_T[rows])
        if smoothing:
            losses_T[rows].lerp_(-logp.mean(1), smoothing)
        if distill is not None:
            T = distill.temperature
            ours = torch.log_softmax(logits_TV[rows].to(dtype) / T, dim=1)
            theirs = torch.log_softmax(distill.logits_BSV[rows].to(dtype) / T, dim=1)
            divergence = (theirs.exp() * (theirs - ours)).sum(1)
            losses_T[rows] += distill.weight * T**2 * divergence
    return losses_T


def write_gradient(
    logits_TV: Tensor,
    targets_T: Tensor,
    grad_T: Tensor,
    smoothing: float = 0.0,
    distill: DistillTargets | None = None,
    *,
    out_TV: Tensor,
    temperature: float = 1.0,
    of_entropies_T: Tensor | None = None,
) -> None:
    """Write the gradient of the logits of `row_losses`, times grad_T, to out_TV, which may be the logits themselves.

    With `of_entropies_T` (T,), the gradient of `row_entropies`, -p_v (log p_v + H), times it, is added.
    """
    for rows in _row_blocks(logits_TV):
        logits = _tempered(logits_TV[rows], grad_T.dtype, temperature)
        softmax = torch.softmax(logits, dim=1)
        grad = grad_T[rows, None] / temperature
        of_entropy = None
        if of_entropies_T is not None:
            logp = torch.log_softmax(logits, dim=1)
            entropy = -(softmax * logp).sum(1, keepdim=True)
            of_entropy = softmax * logp.add_(entropy) * (-of_entropies_T[rows, None] / temperature)
        if smoothing:
            softmax.sub_(smoothing / softmax.shape[1])
        if distill is not None:
            T = distill.temperature
            theirs = torch.softmax(distill.logits_BSV[rows].to(grad_T.dtype) / T, dim=1)
            softmax.add_(torch.softmax(logits / T, dim=1).sub_(theirs), alpha=distill.weight * T)
        softmax.mul_(grad)
        softmax.scatter_add_(1, targets_T[rows, None], (smoothing - 1.0) * grad)
        out_TV[rows] = softmax if of_entropy is None else softmax.add_(of_entropy)


def row_entropies(logits_TV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropies (T,) in nats of softmax(z / temperature), FP32 or FP64, not seen by autograd."""
    dtype = accumulate_dtype(logits_TV.dtype)
    found_T = torch.empty(len(logits_TV), dtype=dtype, device=logits_TV.device)
    for rows in _row_blocks(logits_TV):
        logp = torch.log_softmax(_tempered(logits_TV[rows], dtype, temperature), dim=1)
        found_T[rows] = -logp.exp().mul_(logp).sum(1)
    return found_T


def _tempered(logits_TV: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Logits in the dtype of sums, divided by the temperature."""
    logits_TV = logits_TV.to(dtype)
    return logits_TV if temperature == 1.0 else logits_TV / temperature


def _row_blocks(logits_TV: Tensor) -> Iterator[slice]:
    elements = _BLOCK_ELEMENTS_CPU if logits_TV.device.type == "cpu" else _BLOCK_ELEMENTS_GPU
    T, V = logits_TV.shape
    size = max(1, elements // V)
    return (slice(start, min(start + size, T)) for start in range(0, T, size))
