"""Spans of neighbouring experts that are processed together, with padding for their products.

Products of BF16 matrices take rounded row counts (`gemm_rows`), and weight gradients sum over the rows, so in the
backward an expert's padding may not be the rows of the next one. A row's position in a padded buffer is its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from expertmesh.ops.cpu.products import gemm_rows


@dataclass(frozen=True)
class ExpertSpan:
    """Rows of neighbouring experts; experts without rows are left out."""

    experts: list[int]  # indices of the experts
    starts: list[int]  # first row of each expert
    counts: list[int]  # number of rows of each expert
    sizes: list[int]  # number of places of each expert: its rows and their padding
    device: torch.device  # the device of the rows

    @cached_property
    def rows(self) -> slice:
        """Range of all rows of the span."""
        return slice(self.starts[0], self.starts[-1] + self.counts[-1])

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.sizes == self.counts:
            return None, None
        # for each place: the shift from places to rows due to padding before its expert, and the expert's last row
        first_place, columns = 0, []
        for start, count, size in zip(self.starts, self.counts, self.sizes, strict=True):
            columns.append((start - first_place, start + count - 1, size))
            first_place += size
        shift, last, repeats = torch.tensor(columns, dtype=torch.int32, device=self.device).unbind(1)
        both = torch.stack((shift, last)).repeat_interleave(repeats, 1, output_size=first_place)
        wanted = torch.arange(first_place, dtype=torch.int32, device=self.device).add_(both[0])
        row_of_place = torch.minimum(wanted, both[1])
        return row_of_place, wanted == row_of_place

    @property
    def row_of_place(self) -> Tensor | None:
        """(W,) int32 row of each place; padding has the expert's last row. None without padding."""
        return self._places[0]

    @property
    def live(self) -> Tensor | None:
        """(W,) bool, False in the padding; None without padding."""
        return self._places[1]

    @property
    def num_places(self) -> int:
        """Number of places, W."""
        return sum(self.sizes)

    @property
    def padding(self) -> int:
        """Largest number of places of an expert behind the span's last row."""
        ends = (start + size for start, size in zip(self.starts, self.sizes, strict=True))
        return max(ends) - self.rows.stop

    def split(self, values_W: Tensor) -> Sequence[Tensor]:
        """Split values by place into one view per expert."""
        return torch.split_with_sizes(values_W, self.sizes)

    def rows_of(self, values: Tensor, first: int = 0) -> Sequence[Tensor]:
        """Views of rows, one per expert, from its first row and as long as its places: padding covers other experts'
        rows."""
        if self.sizes == self.counts:
            return torch.split_with_sizes(values[self.rows.start - first : self.rows.stop - first], self.sizes)
        pairs = zip(self.starts, self.sizes, strict=True)
        return [values[start - first : start - first + size] for start, size in pairs]

    def taken(self, values_R: Tensor) -> Tensor:
        """Gather one value per place, (R,) -> (W,)."""
        if self.row_of_place is None:
            return values_R[self.rows]
        return values_R.index_select(0, self.row_of_place)

    def without_padding(self, values_W: Tensor) -> Tensor:
        """Values with zeros in the padding."""
        return values_W if self.live is None else values_W * self.live


def make_runs(
    bounds: list[int],
    most_places: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_narrow: bool,
) -> list[ExpertSpan]:
    """Group neighbouring experts into spans of at most `most_places` places, or of one expert.

    In training one expert's rows are enough work for a call. In decoding and for narrow experts, calls would cost more
    than the work.
    """
    runs: list[ExpertSpan] = []
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        size = gemm_rows(stop - start, device, dtype, is_coarse=is_narrow)
        if not runs or runs[-1].num_places + size > most_places:
            runs.append(ExpertSpan([], [], [], [], device))
        columns = (runs[-1].experts, runs[-1].starts, runs[-1].counts, runs[-1].sizes)
        for column, value in zip(columns, (e, start, stop - start, size), strict=True):
            column.append(value)
    return runs
