"""Log-probabilities of given tokens from hidden states, in chunks of rows: the logits of all rows are never held at
once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expertmesh.costs.sizes import chunk_rows
from expertmesh.models.token_losses import row_entropies, row_losses, write_gradient
from expertmesh.models.token_rows import OwnRows, put_logits
from expertmesh.moe.dense_parts import Linear
from expertmesh.ops.cpu.products import product
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype, without_autocast
from expertmesh.ops.op_set import low_rank_rows

Product = Callable[[Tensor, Tensor], Tensor]
"""x (R, D), w (V, D) -> x w^T (R, V); `OpSet.linear` is one."""


class Scores(NamedTuple):
    """Scores of rows, each of which has a target."""

    logprobs_R: Tensor  # (R,) log-probabilities of the targets, FP32 or FP64
    # (R,) entropies in nats of the rows' distributions, in the same dtype; None: not asked for
    entropies_R: Tensor | None = None


class Head(Linear):
    """The output matrix of a language model: logits of hidden states or, with targets, the targets' scores.

    Both are calls of the module, so that wrappers of modules reach it.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        targets_R: Tensor | None = None,
        weight: Tensor | None = None,
        own: OwnRows | None = None,
        **how: Any,
    ) -> Any:
        """(..., D) -> (..., V) logits; with targets (R, D) -> `Scores`, see `score_rows` and its options; `weight`: see
        `Linear`."""
        linear = self.arithmetic.in_mode(self.training).linear
        if targets_R is None:
            logits = super().forward(x, weight)
            return logits if own is None else put_logits(logits, own, x, linear)
        more: tuple[Tensor, Tensor] | tuple[()] = ()
        if self.adapters is not None and self.adapters.weight is not None:
            more = low_rank_rows(x, self.adapters.weight(), linear, backend=self.backend)
        weight = self.weight if weight is None else weight
        return score_rows(x, weight, targets_R, linear=linear, more=more, own=own, **how)


def score_rows(
    h_RD: Tensor,
    head_VD: Tensor,  # (V, D) output matrix
    targets_R: Tensor,  # (R,) int64 tokens, in 0 ... V - 1.
    *,
    linear: Product,
    label_smoothing: float = 0.0,  # s, in [0, 1)
    temperature: float = 1.0,  # divisor of the logits, above 0
    entropy: bool = False,  # whether the entropies -sum_v p_v log p_v of the rows are returned, too
    more: tuple[Tensor, Tensor] | tuple[()] = (),
    own: OwnRows | None = None,
) -> Scores:
    """Log-probability of every row's target: z_target - log sum_v exp(z_v) with z = h W^T / temperature.

    With label smoothing s, z_target becomes (1 - s) z_target + s mean_v z_v (Szegedy et al. 2016, section 7). Rows that
    do not fit into one chunk (`chunk_rows`) are saved as hidden states, and their logits are computed again in the
    backward pass; the logits of a single chunk are kept, and overwritten by their gradient. Sums over the vocabulary
    and over chunks are in FP32 (FP64 for FP64). A frozen head gets no gradient.

    Args:
        h_RD: (R, D) hidden states, any floating dtype; under autocast it and the head are cast to autocast's dtype.
        linear: the product of the model's op set: with a batch-invariant one a row's result depends on that row only.
        more: rows (R, r) and a matrix (V, r) whose product is added to the logits: a low-rank adapter of the head.
        own: rows that stand in the place of the head's for some tokens; not with `more`.

    Returns:
        (R,) each in FP32 or FP64, differentiable once. Does not synchronise.
    """
    dtype = autocast_dtype(h_RD.device)
    if dtype is None or h_RD.dtype == torch.float64:
        dtype = h_RD.dtype
    assert own is None or not more
    factors = (h_RD, head_VD, *more) if own is None else (h_RD, head_VD, own.rows_ND)
    how = _How(linear, label_smoothing, temperature, entropy, None if own is None else own.ids_N)
    return Scores(*_ScoredRows.apply(targets_R, dtype, how, *factors))


class _How(NamedTuple):
    """Options of `score_rows`."""

    linear: Product
    smoothing: float
    temperature: float
    entropy: bool
    own_N: Tensor | None  # tokens whose rows are the last factor

    def terms(self, z: Tensor, factors: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
        """Logits, or their gradient, of each product: places of its rows and of its matrix among the factors.

        Columns of tokens with rows of their own are taken out of `z`.
        """
        if self.own_N is None:
            return [(z, place, place + 1) for place in range(0, len(factors), 2)]
        own = z.index_select(1, self.own_N)
        return [(z.index_fill_(1, self.own_N, 0.0), 0, 1), (own, 0, 2)]


class _ScoredRows(torch.autograd.Function):
    """Scores over chunks of rows; logits are products of rows and matrices, which alternate among the factors."""

    @staticmethod
    def forward(
        ctx: Any,
        targets_R: Tensor,
        dtype: torch.dtype,
        how: _How,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.how, ctx.dtypes = how, [one.dtype for one in factors]
        ctx.set_materialize_grads(False)
        h_RD, head_VD = factors[:2]
        scores_R = h_RD.new_empty(len(h_RD), dtype=accumulate_dtype(dtype))
        entropies_R = torch.empty_like(scores_R) if how.entropy else None
        with without_autocast(h_RD.device):
            kept = [one.to(dtype) for one in factors]
            chunks = _chunks(h_RD, head_VD)
            logits = None
            for rows in chunks:
                logits = None  # the last chunk's are freed before the next one's are made
                logits = _logits(kept, rows, how)
                losses_R = row_losses(logits, targets_R[rows], how.smoothing, temperature=how.temperature)
                scores_R[rows] = losses_R.neg_()
                if entropies_R is not None:
                    entropies_R[rows] = row_entropies(logits, how.temperature)
        ctx.save_for_backward(targets_R, logits if len(chunks) == 1 else None, *kept)
        return scores_R, entropies_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor | None, of_entropies_R: Tensor | None) -> tuple[Tensor | None, ...]:
        targets_R, logits, *factors = ctx.saved_tensors
        needs, chunks, how = ctx.needs_input_grad[3:], _chunks(*factors[:2]), ctx.how
        if grad_R is None:
            grad_R = factors[0].new_zeros(len(targets_R), dtype=accumulate_dtype(factors[0].dtype))
        found: list[Tensor | None] = [None] * len(factors)
        for rows in chunks:
            z = _logits(factors, rows, how) if logits is None else logits.detach()
            write_gradient(
                z,
                targets_R[rows],
                -grad_R[rows],
                how.smoothing,
                out_TV=z,
                temperature=how.temperature,
                of_entropies_T=None if of_entropies_R is None else of_entropies_R[rows],
            )
            terms = how.terms(z, factors)
            for dz, of_rows, of_matrix in terms:
                if needs[of_rows]:
                    part = product(dz, factors[of_matrix])
                    if (d_rows := found[of_rows]) is None:
                        d_rows = found[of_rows] = torch.empty_like(factors[of_rows])
                    if of_matrix == of_rows + 1:
                        d_rows[rows] = part
                    else:
                        d_rows[rows] += part
                    del part
                if needs[of_matrix]:
                    part = product(dz.t(), factors[of_rows][rows])
                    before = found[of_matrix]
                    if before is None:
                        found[of_matrix] = part if len(chunks) == 1 else part.to(grad_R.dtype)
                    else:
                        before += part
                    del part
            del z, dz, terms
        for place, need in enumerate(needs):
            if need and found[place] is None:
                found[place] = torch.zeros_like(factors[place])
        typed = zip(found, ctx.dtypes, strict=True)
        return *[None] * 3, *(None if d is None else d.to(of).contiguous() for d, of in typed)


def _logits(factors: Sequence[Tensor], rows: slice, how: _How) -> Tensor:
    """Logits (R, V) of a chunk of rows."""
    z = how.linear(factors[0][rows], factors[1])
    if how.own_N is not None:
        return put_logits(z, OwnRows(how.own_N, factors[2]), factors[0][rows], how.linear)
    return z + how.linear(factors[2][rows], factors[3]) if len(factors) > 2 else z


def _chunks(h_RD: Tensor, head_VD: Tensor) -> list[slice]:
    """Rows of equal chunks, none of them longer than `chunk_rows`."""
    R = len(h_RD)
    count = -(-R // chunk_rows(len(head_VD), on_gpu=not h_RD.is_cpu))
    size = -(-R // max(count, 1))
    return [slice(start, min(start + size, R)) for start in range(0, R, max(size, 1))]
