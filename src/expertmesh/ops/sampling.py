"""Sampling: from logits to token ids and logprobs for all rows in one call; each row's result depends on that row
only."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.philox import philox4x32


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of R rows; a tensor that is named as an option of a request has its values."""

    temperature_R: Tensor  # FP64 temperatures; 0: greedy
    top_k_R: Tensor  # int64 number of tokens kept; V or more: all
    top_p_R: Tensor  # FP64 probability mass kept; 1: all
    min_p_R: Tensor  # FP64 smallest probability relative to the largest; 0: all
    seed_R: Tensor  # int64 seeds
    answer_R: Tensor  # int64 index of the row's answer among its prompt's answers
    position_R: Tensor  # int64 position of the token to sample
    all_greedy: bool  # whether all rows are greedy; known on the host
    none_filters: bool  # whether no row has a filter: top_k, top_p, min_p

    def first(self, num: int) -> Self:
        """Parameters of the first rows."""
        tensors: dict[str, Any] = {name: t[:num] for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **tensors)


KEEPS_ALL = {"top_k": 2**63 - 1, "top_p": 1.0}
"""Values of the filters that keep all tokens, for requests that leave them out."""


def uniform_of(seed_R: Tensor, answer_R: Tensor, position_R: Tensor) -> Tensor:
    """(R,) FP64 uniform numbers in [0, 1): 53 bits of Philox keyed by seed, answer and position only."""
    low = 0xFFFFFFFF
    words_R4 = philox4x32(
        position_R & low,
        (position_R >> 32) & low,
        answer_R & low,
        torch.full_like(position_R, _STREAM),
        seed_R & low,
        (seed_R >> 32) & low,
    )
    return ((words_R4[:, 0] >> 5).double() * 2.0**26 + (words_R4[:, 1] >> 6).double()) * 2.0**-53


_STREAM = 0x53414D50
"""Stream constant that separates these random numbers from the routing noise of the same seed."""


def token_probs(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """(R, V) FP64 probabilities after temperature, top_k, top_p and min_p, in this order; ties keep the smaller ids."""
    logits_RV = logits_RV.double()
    # The maximum is subtracted first, so that a tiny temperature does not make it infinite.
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    cold = batch.temperature_R <= 0
    scaled = logits_RV / torch.where(cold, 1.0, batch.temperature_R)[:, None]
    if batch.none_filters:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(place_V >= batch.top_k_R[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    # the exclusive sum is 0 at the most likely token, so rounding cannot remove it
    before = probs.cumsum(-1) - probs
    gone = (before >= batch.top_p_R[:, None]) | (probs < batch.min_p_R[:, None] * probs[:, :1])
    probs = probs.masked_fill(gone, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, probs)


def draw(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample (R,) int64 token ids; does not synchronise with the device.

    The sampled token is the one whose interval of the cumulative distribution contains the row's uniform number. A row
    that is not finite gets some token of the vocabulary.
    """
    # on a CPU argmax in FP32 is five times as fast as in 16 bits
    greedy_R = logits_RV.to(accumulate_dtype(logits_RV.dtype)).argmax(-1)
    if batch.all_greedy:
        return greedy_R
    cumulative = token_probs(logits_RV, batch).cumsum(-1)
    uniform_R = uniform_of(batch.seed_R, batch.answer_R, batch.position_R)
    # scaled by the last value: rows with removed tokens do not sum to 1, and rounding may leave others below it
    threshold = uniform_R[:, None] * cumulative[:, -1:]
    drawn_R = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # in a row without a distribution (NaN) no interval has the number
    drawn_R = drawn_R.clamp(max=logits_RV.shape[-1] - 1)
    return torch.where(batch.temperature_R <= 0, greedy_R, drawn_R)


def are_finite(logits_RV: Tensor) -> Tensor:
    """(R,) bool: whether all logits of a row are finite; 0 times inf or NaN is NaN."""
    return (logits_RV * 0).sum(-1) == 0


def logprobs(logits_RV: Tensor) -> Tensor:
    """(R, V) log-softmax of raw logits in FP32 (FP64 for FP64)."""
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    return logits_RV.log_softmax(-1, dtype=dtype)


def penalised(
    logits_RV: Tensor,
    rows_N: Tensor,  # rows of the N distinct (row, token) pairs that occur in prompt or answer
    ids_N: Tensor,  # token ids of these pairs
    *,
    times_N: Tensor,  # number of occurrences in the answer
    is_generated_N: Tensor,  # whether the token occurs in the answer
    repetition_R: Tensor,  # divisor of positive logits and factor of negative ones
    presence_R: Tensor,  # subtracted once from logits of tokens in the answer
    frequency_R: Tensor,  # subtracted once per occurrence in the answer
) -> Tensor:
    """Apply repetition, presence and frequency penalties; returns a new tensor."""
    found = logits_RV[rows_N, ids_N]
    factor = repetition_R[rows_N]
    found = torch.where(found > 0, found / factor, found * factor)
    found = found - is_generated_N * presence_R[rows_N] - times_N * frequency_R[rows_N]
    return logits_RV.index_put((rows_N, ids_N), found.to(logits_RV.dtype))
