"""From logits to token ids and logprobs, one call for all rows; what a row gets depends on the row alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.philox import philox4x32


@dataclass(frozen=True)
class SamplingBatch:
    """How the token of each of R rows is drawn.

    Attributes:
        temperature_R: FP64; 0: the most likely token.
        top_k_R: int64, V where all tokens stay.
        top_p_R: FP64, 1 where all stay.
        min_p_R: FP64, 0 where all stay.
        seed_R: int64 seeds.
        answer_R: int64 index of the answer that a row belongs to.
        position_R: int64 position of the token that is drawn.
        all_greedy: whether no row draws; known without waiting for the device.
        none_filters: whether no row has top_k, top_p or min_p.
    """

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    seed_R: Tensor
    answer_R: Tensor
    position_R: Tensor
    all_greedy: bool
    none_filters: bool


def uniform_of(seed_R: Tensor, answer_R: Tensor, position_R: Tensor) -> Tensor:
    """(R,) FP64 numbers in [0, 1): 53 bits of Philox keyed by seed, answer and position, and by nothing else."""
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
"""Keeps these numbers apart from those of routing with the same seed."""


def token_probs(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """(R, V) FP64 probabilities after temperature, top_k, top_p and min_p, in this order; of ties the smaller ids stay."""
    logits_RV = logits_RV.double()
    # The largest becomes 0 first, so that no temperature, however small, makes an infinity of it.
    logits_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    cold = batch.temperature_R <= 0
    scaled = logits_RV / torch.where(cold, 1.0, batch.temperature_R)[:, None]
    if batch.none_filters:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(place_V >= batch.top_k_R[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    # rounding must not remove the most likely token, whose sum before it is 0
    before = probs.cumsum(-1) - probs
    gone = (before >= batch.top_p_R[:, None]) | (probs < batch.min_p_R[:, None] * probs[:, :1])
    probs = probs.masked_fill(gone, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, probs)


def draw(logits_RV: Tensor, batch: SamplingBatch) -> Tensor:
    """(R,) int64 token ids; does not synchronise with the device.

    A drawn token is the one whose interval of the cumulative distribution holds the row's number.
    """
    # on a CPU that is five times as fast as of narrow numbers
    greedy_R = logits_RV.to(accumulate_dtype(logits_RV.dtype)).argmax(-1)
    if batch.all_greedy:
        return greedy_R
    cumulative = token_probs(logits_RV, batch).cumsum(-1)
    uniform_R = uniform_of(batch.seed_R, batch.answer_R, batch.position_R)
    # scaled by the last value, since filtered rows do not sum to 1, and rounding may leave others below it
    threshold = uniform_R[:, None] * cumulative[:, -1:]
    drawn_R = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return torch.where(batch.temperature_R <= 0, greedy_R, drawn_R)


def are_finite(logits_RV: Tensor) -> Tensor:
    """(R,) bool: whether all of a row are; 0 times what is not finite is NaN."""
    return (logits_RV * 0).sum(-1) == 0


def logprobs(logits_RV: Tensor) -> Tensor:
    """(R, V) log-softmax of raw logits in FP32 (FP64 for FP64)."""
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    return logits_RV.log_softmax(-1, dtype=dtype)


def penalised(
    logits_RV: Tensor,
    rows_N: Tensor,
    ids_N: Tensor,
    *,
    times_N: Tensor,
    is_generated_N: Tensor,
    repetition_R: Tensor,
    presence_R: Tensor,
    frequency_R: Tensor,
) -> Tensor:
    """Logits less what the tokens of a sequence have cost; a new tensor.

    Args:
        logits_RV: logits.
        rows_N: rows of N different pairs of row and token that occurred in prompt or answer.
        ids_N: tokens of these pairs.
        times_N: how often the answer has the token.
        is_generated_N: whether it has it at all.
        repetition_R: positive logits are divided by it, negative ones multiplied.
        presence_R: subtracted from those of the answer.
        frequency_R: subtracted for each time.
    """
    found = logits_RV[rows_N, ids_N]
    factor = repetition_R[rows_N]
    found = torch.where(found > 0, found / factor, found * factor)
    found = found - is_generated_N * presence_R[rows_N] - times_N * frequency_R[rows_N]
    return logits_RV.index_put((rows_N, ids_N), found.to(logits_RV.dtype))
