"""Conversion of sampling parameters of several requests to one `SamplingBatch`."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.sampling import SamplingParams
from expertmesh.ops.sampling import KEEPS_ALL, SamplingBatch

FILTERS = {
    name: SamplingParams.model_fields[name].default
    for name in (field.name.removesuffix("_R") for field in fields(SamplingBatch))
    if name in SamplingParams.model_fields and name not in ("temperature", "seed")
}
"""Defaults of the options of a request that remove tokens before one is drawn."""


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
        is_real = len(values) > 0 and isinstance(values[0], float)
        dtype = torch.float64 if is_real else torch.int64
        return torch.tensor(values, dtype=dtype, device=device)

    temperatures = [0.0 if one.is_greedy else one.temperature for one in params]
    filters: dict[str, Any] = {}
    none_filters = True
    for name, default in FILTERS.items():
        values = [getattr(one, name) for one in params]
        none_filters &= values.count(default) == len(values)
        filters[f"{name}_R"] = tensor([KEEPS_ALL[name] if v is None else v for v in values])
    return SamplingBatch(
        temperature_R=tensor(temperatures),
        **filters,
        seed_R=tensor(seeds),
        answer_R=tensor(answers),
        position_R=tensor(positions),
        all_greedy=not any(temperatures),
        none_filters=none_filters,
    )
