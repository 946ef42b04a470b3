"""Log-probabilities of given tokens from hidden states, in chunks of rows: the logits of all rows are never held at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.costs.sizes import chunk_rows
from expertmesh.models.token_losses import row_entropies, row_losses, write_gradient
from expertmesh.moe.dense_parts import Linear
from expertmesh.ops.cpu.products import product
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype, without_autocast

Product = Callable[[Tensor, Tensor], Tensor]
"""x (R, D), w (V, D) -> x w^T (R, V); `OpSet.linear` is one."""


class Scores(NamedTuple):
    """Scores of rows, each of which has a target.

    Attributes:
        logprobs_R: (R,) log-probabilities of the targets, FP32 or FP64.
        entropies_R: (R,) entropies in nats of the rows' distributions, in the same dtype; None: not asked for.
    """

    logprobs_R: Tensor
    entropies_R: Tensor | None = None


class Head(Linear):
    """The output matrix of a language model: logits of hidden states or, with targets, the targets' scores.

    Both are calls of the module, so that wrappers of modules reach it.
    """

    def forward(self, x: Tensor, targets_R: Tensor | None = None, **how: Any) -> Any:
        """(..., D) -> (..., V) logits; with targets (R, D) -> `Scores`, see `score_rows` and its options."""
        if targets_R is None:
            return super().forward(x)
        linear = self.arithmetic.in_mode(self.training).linear
        return score_rows(x, self.weight, targets_R, linear=linear, **how)


def score_rows(
    h_RD: Tensor,
    head_VD: Tensor,
    targets_R: Tensor,
    *,
    linear: Product,
    label_smoothing: float = 0.0,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Scores:
    """Log-probability of every row's target: z_target - log sum_v exp(z_v) with z = h W^T / temperature.

    With label smoothing s, z_target becomes (1 - s) z_target + s mean_v z_v (Szegedy et al. 2016, section 7). Rows that do
    not fit into one chunk (`chunk_rows`) are saved as hidden states, and their logits are computed again in the
    backward pass; the logits of a single chunk are kept, and overwritten by their gradient. Sums over the vocabulary and
    over chunks are in FP32 (FP64 for FP64). A frozen head gets no gradient.

    Args:
        h_RD: (R, D) hidden states, any floating dtype; under autocast it and the head are cast to autocast's dtype.
        head_VD: (V, D) output matrix.
        targets_R: (R,) int64 tokens, in 0 ... V - 1.
        linear: the product of the model's op set: with a batch-invariant one a row's result depends on that row only.
        label_smoothing: s, in [0, 1).
        temperature: divisor of the logits, above 0.
        entropy: whether the entropies -sum_v p_v log p_v of the rows are returned, too.

    Returns:
        (R,) each in FP32 or FP64, differentiable once. Does not synchronise.
    """
    dtype = autocast_dtype(h_RD.device)
    if dtype is None or h_RD.dtype == torch.float64:
        dtype = h_RD.dtype
    how = _How(linear, label_smoothing, temperature, entropy)
    return Scores(*_ScoredRows.apply(h_RD, head_VD, targets_R, dtype, how))


class _How(NamedTuple):
    """Options of `score_rows`."""

    linear: Product
    smoothing: float
    temperature: float
    entropy: bool


class _ScoredRows(torch.autograd.Function):
    """Scores over chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        h_RD: Tensor,
        head_VD: Tensor,
        targets_R: Tensor,
        dtype: torch.dtype,
        how: _How,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.how, ctx.dtypes = how, (h_RD.dtype, head_VD.dtype)
        ctx.set_materialize_grads(False)
        scores_R = h_RD.new_empty(len(h_RD), dtype=accumulate_dtype(dtype))
        entropies_R = torch.empty_like(scores_R) if how.entropy else None
        with without_autocast(h_RD.device):
            h_RD, head_VD = h_RD.to(dtype), head_VD.to(dtype)
            chunks = _chunks(h_RD, head_VD)
            logits = None
            for rows in chunks:
                logits = None  # the last chunk's are freed before the next one's are made
                logits = how.linear(h_RD[rows], head_VD)
                losses_R = row_losses(
                    logits, targets_R[rows], how.smoothing, temperature=how.temperature
                )
                scores_R[rows] = losses_R.neg_()
                if entropies_R is not None:
                    entropies_R[rows] = row_entropies(logits, how.temperature)
        kept = logits if len(chunks) == 1 else None
        ctx.save_for_backward(h_RD, head_VD, targets_R, kept)
        return scores_R, entropies_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_R: Tensor | None, of_entropies_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        h_RD, head_VD, targets_R, logits = ctx.saved_tensors
        (needs_h, needs_head, *_), chunks, how = (
            ctx.needs_input_grad,
            _chunks(h_RD, head_VD),
            ctx.how,
        )
        if grad_R is None:
            grad_R = h_RD.new_zeros(len(h_RD), dtype=accumulate_dtype(h_RD.dtype))
        dh = torch.empty_like(h_RD) if needs_h else None
        dhead = None
        for rows in chunks:
            z = how.linear(h_RD[rows], head_VD) if logits is None else logits.detach()
            write_gradient(
                z,
                targets_R[rows],
                -grad_R[rows],
                how.smoothing,
                out_TV=z,
                temperature=how.temperature,
                of_entropies_T=None if of_entropies_R is None else of_entropies_R[rows],
            )
            if dh is not None:
                dh[rows] = product(z, head_VD)
            if needs_head:
                part = product(z.t(), h_RD[rows])
                if dhead is None:
                    dhead = part if len(chunks) == 1 else part.to(grad_R.dtype)
                else:
                    dhead += part
                del part
            del z
        of_h, of_head = ctx.dtypes
        if needs_head and dhead is None:
            dhead = torch.zeros_like(head_VD)
        return (
            None if dh is None else dh.to(of_h),
            None if dhead is None else dhead.to(of_head).contiguous(),
            *[None] * 3,
        )


def _chunks(h_RD: Tensor, head_VD: Tensor) -> list[slice]:
    """Rows of equal chunks, none of them longer than `chunk_rows`."""
    R = len(h_RD)
    count = -(-R // chunk_rows(len(head_VD), on_gpu=not h_RD.is_cpu))
    size = -(-R // max(count, 1))
    return [slice(start, min(start + size, R)) for start in range(0, R, max(size, 1))]
