"""Rows of one expert among all sorted rows, padded for the CPU's products by up to 1/32 or 1/8 (`gemm_rows`), so that
few shapes occur.

Padding rows must not affect the expert's own rows, even if they are not finite.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.ops.cpu.products import gemm_rows

_TILE = 32
"""Elements that AMX reads at once: at a row's end it reads on into the next row and multiplies these elements by
zero."""
_NARROW = 1 << 16


class ExpertRows(NamedTuple):
    """Rows of one expert that has rows."""

    expert: int  # index of the expert
    start: int  # first row
    stop: int  # last row + 1
    size: int  # number of rows to multiply, padding included

    def each(self, values: Tensor) -> Tensor:
        """Rows to multiply if each has its own result; padding is the next experts' rows, or zeros."""
        end = self.start + self.size
        if end == self.stop or (end <= len(values) and values.shape[1] % _TILE == 0):
            return values[self.start : end]
        return self.alone(values)

    def alone(self, values: Tensor) -> Tensor:
        """Rows to multiply if results are sums over rows; padding is zeros."""
        own = values[self.start : self.stop]
        behind = self.size - len(own)
        return F.pad(own, (0, 0, 0, behind)) if behind else own

    def room(self, values: Tensor) -> Tensor:
        """Output buffer of the rows: in place, because later experts overwrite the padding; a new tensor if it would
        reach past the end."""
        end = self.start + self.size
        if end <= len(values):
            return values[self.start : end]
        return values.new_empty(self.size, values.shape[1])

    def keep(self, found: Tensor, values: Tensor) -> None:
        """Copy results from a separate buffer of `room` to their rows."""
        if self.start + self.size > len(values):
            values[self.start : self.stop] = found[: self.stop - self.start]


def rows_by_expert(
    bounds: list[int], w_ENK: Tensor, dtype: torch.dtype, *, is_coarse: bool = False
) -> Iterator[ExpertRows]:
    """Rows of each expert that has rows, in order. `is_coarse`: as of `gemm_rows`; small matrices always are."""
    is_coarse = is_coarse or w_ENK.shape[1] * w_ENK.shape[2] <= _NARROW
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            size = gemm_rows(stop - start, w_ENK.device, dtype, is_coarse=is_coarse)
            yield ExpertRows(e, start, stop, size)
