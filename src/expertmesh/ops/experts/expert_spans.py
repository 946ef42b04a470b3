"""Runs of neighbouring experts that go through each step together, with room for the padding of their products.

Products of BF16 matrices take rounded row counts (`gemm_rows`), and weight gradients sum over the rows, so in the
backward the padding of one expert may not be the rows of the next. A row's position in such a buffer is its place.
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
    """The rows of some neighbouring experts, all of which have rows.

    Attributes:
        experts: their numbers.
        starts: first row of each.
        counts: rows of each.
        sizes: places of each: its rows and their padding.
        device: the device of the rows.
    """

    experts: list[int]
    starts: list[int]
    counts: list[int]
    sizes: list[int]
    device: torch.device

    @cached_property
    def rows(self) -> slice:
        """All rows."""
        return slice(self.starts[0], self.starts[-1] + self.counts[-1])

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.sizes == self.counts:
            return None, None
        # what the padding before an expert shifts its rows by, and its last row, at all its places
        first_place, columns = 0, []
        for start, count, size in zip(self.starts, self.counts, self.sizes, strict=True):
            columns.append((start - first_place, start + count - 1, size))
            first_place += size
        shift, last, repeats = torch.tensor(columns, dtype=torch.int32, device=self.device).unbind(
            1
        )
        both = torch.stack((shift, last)).repeat_interleave(repeats, 1, output_size=first_place)
        wanted = torch.arange(first_place, dtype=torch.int32, device=self.device).add_(both[0])
        row_of_place = torch.minimum(wanted, both[1])
        return row_of_place, wanted == row_of_place

    @property
    def row_of_place(self) -> Tensor | None:
        """(W,) int32 row at each place, in the padding the expert's last one; None: nothing is padded."""
        return self._places[0]

    @property
    def live(self) -> Tensor | None:
        """(W,) bool, False in the padding; None: nothing is padded."""
        return self._places[1]

    @property
    def num_places(self) -> int:
        """W."""
        return sum(self.sizes)

    @property
    def padding(self) -> int:
        """The most that an expert's places reach behind the run's last row."""
        ends = (start + size for start, size in zip(self.starts, self.sizes, strict=True))
        return max(ends) - self.rows.stop

    def split(self, values_W: Tensor) -> Sequence[Tensor]:
        """The places of each expert."""
        return torch.split_with_sizes(values_W, self.sizes)

    def rows_of(self, values: Tensor, first: int = 0) -> Sequence[Tensor]:
        """As many rows as an expert has places, from its first row: the padding covers other experts' rows.

        Args:
            values: the values of the rows from `first` on.
            first: a row.
        """
        if self.sizes == self.counts:
            return torch.split_with_sizes(
                values[self.rows.start - first : self.rows.stop - first], self.sizes
            )
        pairs = zip(self.starts, self.sizes, strict=True)
        return [values[start - first : start - first + size] for start, size in pairs]

    def taken(self, values_R: Tensor) -> Tensor:
        """A value per row, (R,) -> (W,)."""
        if self.row_of_place is None:
            return values_R[self.rows]
        return values_R.index_select(0, self.row_of_place)

    def without_padding(self, values_W: Tensor) -> Tensor:
        """The values with zeros in the padding."""
        return values_W if self.live is None else values_W * self.live


def make_runs(
    bounds: list[int],
    most_places: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_narrow: bool,
) -> list[ExpertSpan]:
    """Neighbouring experts that go through each step together: up to this many places, or one expert.

    One expert's rows at a time are enough work for a step in training; in decoding and for narrow experts the calls
    would cost more than the work.
    """
    runs: list[ExpertSpan] = []
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        size = gemm_rows(stop - start, device, dtype, is_narrow=is_narrow)
        if not runs or runs[-1].num_places + size > most_places:
            runs.append(ExpertSpan([], [], [], [], device))
        columns = (runs[-1].experts, runs[-1].starts, runs[-1].counts, runs[-1].sizes)
        for column, value in zip(columns, (e, start, stop - start, size), strict=True):
            column.append(value)
    return runs
