"""Sampling parameters of several rows of logits: as numbers on the host, and as one `SamplingBatch`."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.packed import REAL, WHOLE, packed
from expertmesh.ops.sampling import KEEPS_ALL, SamplingBatch

_OF_PLACE = ("seed", "answer", "position")


def _kind(name: str) -> str:
    """Kind of the numbers of a `SamplingBatch` tensor, by the option's default or the value that keeps all tokens."""
    if name in _OF_PLACE:
        return WHOLE
    value = KEEPS_ALL.get(name, SamplingParams.model_fields[name].default)
    return WHOLE if isinstance(value, int) else REAL


_KINDS = {
    name: _kind(name)
    for name in (field.name.removesuffix("_R") for field in fields(SamplingBatch) if field.name.endswith("_R"))
}
"""Kinds of the tensors of a `SamplingBatch`, in its order, by their names without the axis."""
FILTERS = {
    name: SamplingParams.model_fields[name].default for name in _KINDS if name not in ("temperature", *_OF_PLACE)
}
"""Defaults of the options of a request that remove tokens before one is drawn."""
_PADDING = {name: 0.0 if kind == REAL else 0 for name, kind in _KINDS.items()} | KEEPS_ALL


@dataclass(frozen=True)
class SamplingNumbers:
    """Sampling parameters of the next token of each of R rows, on the host."""

    parts: tuple[array, ...]  # R numbers of each kind, in the order of the tensors of `SamplingBatch`
    all_greedy: bool  # see `SamplingBatch`
    none_filters: bool  # see `SamplingBatch`

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],  # sampling parameters of each row
        *,
        seeds: Sequence[int],  # seed of each row
        answers: Sequence[int],  # index of each row's answer within its request
        positions: Sequence[int],  # position of each sampled token
        num_rows: int | None = None,  # number of rows; None: as many as there are
    ) -> Self:
        """Parameters of rows, and of greedy ones behind them up to num_rows."""
        temperatures = [0.0 if one.is_greedy else one.temperature for one in params]
        values: dict[str, Sequence[Any]] = {"temperature": temperatures}
        none_filters = True
        for name, default in FILTERS.items():
            own = [getattr(one, name) for one in params]
            none_filters &= own.count(default) == len(own)
            values[name] = [KEEPS_ALL[name] if v is None else v for v in own]
        values |= zip(_OF_PLACE, (seeds, answers, positions), strict=True)
        more = 0 if num_rows is None else num_rows - len(params)
        parts = (array(kind, [*values[n], *[_PADDING[n]] * more]) for n, kind in _KINDS.items())
        return cls(tuple(parts), not any(temperatures), none_filters)

    def batch(self, tensors: Sequence[Tensor]) -> SamplingBatch:
        """The tensors of the parts with what the host knows."""
        named = dict(zip((f"{name}_R" for name in _KINDS), tensors, strict=True))
        return SamplingBatch(**named, all_greedy=self.all_greedy, none_filters=self.none_filters)

    def on(self, device: torch.device) -> SamplingBatch:
        """The parameters on a device."""
        return self.batch(packed(self.parts, device)[1])
