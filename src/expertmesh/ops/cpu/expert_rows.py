"""The rows of one expert among those of all, as the CPU's products take them: up to 1/32 more (`gemm_rows`), so that few counts occur.

What is multiplied beside an expert's own rows must not matter to it, not even where it is not finite.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.ops.cpu.products import gemm_rows

_TILE = 32
"""Elements that AMX reads at once: where a row ends within, it reads on into the next row and multiplies that by zeros."""
_NARROW = 1 << 16


class ExpertRows(NamedTuple):
    """The rows of an expert that has some.

    Attributes:
        expert: its number.
        start: its first row.
        stop: the one behind its last row.
        size: rows to multiply, no fewer.
    """

    expert: int
    start: int
    stop: int
    size: int

    def each(self, values: Tensor) -> Tensor:
        """The rows to multiply where each has a result of its own: the next experts' behind this one's, or zeros."""
        end = self.start + self.size
        if end == self.stop or (end <= len(values) and values.shape[1] % _TILE == 0):
            return values[self.start : end]
        return self.alone(values)

    def alone(self, values: Tensor) -> Tensor:
        """The rows to multiply where results are sums over them: zeros behind this expert's."""
        own = values[self.start : self.stop]
        behind = self.size - len(own)
        return F.pad(own, (0, 0, 0, behind)) if behind else own

    def room(self, values: Tensor) -> Tensor:
        """Where results of the rows go: in place, as later experts write theirs over what is too much; apart at the end."""
        end = self.start + self.size
        if end <= len(values):
            return values[self.start : end]
        return values.new_empty(self.size, values.shape[1])

    def keep(self, found: Tensor, values: Tensor) -> None:
        """Bring results that are apart to their place."""
        if self.start + self.size > len(values):
            values[self.start : self.stop] = found[: self.stop - self.start]


def rows_by_expert(bounds: list[int], w_ENK: Tensor, dtype: torch.dtype) -> Iterator[ExpertRows]:
    """The experts with rows, in their order.

    Args:
        bounds: where each expert's rows begin, and where the last one's end.
        w_ENK: the matrices of all.
        dtype: of the products.
    """
    is_narrow = w_ENK.shape[1] * w_ENK.shape[2] <= _NARROW
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            size = gemm_rows(stop - start, w_ENK.device, dtype, is_narrow=is_narrow)
            yield ExpertRows(e, start, stop, size)
