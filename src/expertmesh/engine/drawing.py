"""Conversion of sampling parameters of several requests to one `SamplingBatch`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.engine.request import SamplingParams
from expertmesh.ops.sampling import SamplingBatch


def sampling_batch(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int],
    answers: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> SamplingBatch:
    """Sampling parameters of the next token of each row.

    Args:
        params: sampling parameters of each row.
        seeds: seed of each row.
        answers: index of each row's answer within its request.
        positions: position of each sampled token.
        vocab_size: V.
        device: device of the logits.
    """

    def reals(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    def whole(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return SamplingBatch(
        temperature_R=reals([0.0 if p.is_greedy else p.temperature for p in params]),
        top_k_R=whole([vocab_size if p.top_k is None else p.top_k for p in params]),
        top_p_R=reals([1.0 if p.top_p is None else p.top_p for p in params]),
        min_p_R=reals([p.min_p for p in params]),
        seed_R=whole(seeds),
        answer_R=whole(answers),
        position_R=whole(positions),
        all_greedy=all(p.is_greedy for p in params),
        none_filters=all(p.top_k is None and p.top_p is None and not p.min_p for p in params),
    )
