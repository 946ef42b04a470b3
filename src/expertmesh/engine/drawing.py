"""Conversion of sampling parameters of several requests to one `SamplingBatch`."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.sampling import SamplingParams
from expertmesh.ops.sampling import KEEPS_ALL, SamplingBatch

FILTERS = [
    name
    for name in (field.name.removesuffix("_R") for field in fields(SamplingBatch))
    if name in SamplingParams.model_fields and name not in ("temperature", "seed")
]
"""Options of a request that remove tokens before one is drawn."""


def sampling_batch(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int],
    answers: Sequence[int],
    positions: Sequence[int],
    device: torch.device,
) -> SamplingBatch:
    """Sampling parameters of the next token of each row.

    Args:
        params: sampling parameters of each row.
        seeds: seed of each row.
        answers: index of each row's answer within its request.
        positions: position of each sampled token.
        device: device of the logits.
    """

    def tensor(values: Sequence[float]) -> Tensor:
        are_whole = all(isinstance(value, int) for value in values)
        dtype = torch.int64 if are_whole else torch.float64
        return torch.tensor(values, dtype=dtype, device=device)

    filters: dict[str, Any] = {}
    none_filters = True
    for name in FILTERS:
        values = [getattr(one, name) for one in params]
        default = SamplingParams.model_fields[name].default
        none_filters &= all(value == default for value in values)
        filters[f"{name}_R"] = tensor([KEEPS_ALL[name] if v is None else v for v in values])
    return SamplingBatch(
        temperature_R=tensor([0.0 if one.is_greedy else one.temperature for one in params]),
        **filters,
        seed_R=tensor(seeds),
        answer_R=tensor(answers),
        position_R=tensor(positions),
        all_greedy=all(one.is_greedy for one in params),
        none_filters=none_filters,
    )
