"""Runs of neighbouring experts whose rows lie in one buffer, each with room for the padding of its products.

Products of BF16 matrices take rounded row counts (`gemm_rows`), and weight gradients sum over the rows, so in the
backward the padding of one expert may not be the rows of the next. A row's position in such a buffer is its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.cpu.products import gemm_rows


@dataclass(frozen=True)
class PaddedRun:
    """The rows of some neighbouring experts, all of which have rows.

    Attributes:
        experts: their numbers.
        starts: first row of each.
        rows: all rows.
        sizes: places of each: its rows and their padding.
        row_of_place: (P,) int32 row at each place, in the padding the expert's last one; None: nothing is padded.
        live: (P,) bool, False in the padding; None: nothing is padded.
    """

    experts: list[int]
    starts: list[int]
    rows: slice
    sizes: list[int]
    row_of_place: Tensor | None
    live: Tensor | None

    @staticmethod
    def of(blocks: Sequence[tuple[int, int, int, int]], device: torch.device) -> "PaddedRun":
        """Make a run of (expert, first row, end of its rows, places)."""
        experts, starts, stops, sizes = (list(column) for column in zip(*blocks, strict=True))
        rows = slice(starts[0], stops[-1])
        if sum(sizes) == rows.stop - rows.start:
            return PaddedRun(experts, starts, rows, sizes, None, None)
        # what the padding before an expert shifts its rows by, and its last row, at all its places
        first_place, columns = 0, []
        for start, stop, size in zip(starts, stops, sizes, strict=True):
            columns.append((start - first_place, stop - 1, size))
            first_place += size
        shift, last, repeats = torch.tensor(columns, dtype=torch.int32, device=device).unbind(1)
        both = torch.stack((shift, last)).repeat_interleave(repeats, 1, output_size=first_place)
        wanted = torch.arange(first_place, dtype=torch.int32, device=device).add_(both[0])
        row_of_place = torch.minimum(wanted, both[1])
        return PaddedRun(experts, starts, rows, sizes, row_of_place, wanted == row_of_place)

    @property
    def num_places(self) -> int:
        """P."""
        return sum(self.sizes)

    @property
    def padding(self) -> int:
        """The most that an expert's places reach behind the run's last row."""
        ends = (start + size for start, size in zip(self.starts, self.sizes, strict=True))
        return max(ends) - self.rows.stop

    def split(self, values_P: Tensor) -> Sequence[Tensor]:
        """The places of each expert."""
        return torch.split_with_sizes(values_P, self.sizes)

    def rows_of(self, values_R: Tensor) -> Sequence[Tensor]:
        """As many of all rows as an expert has places, from its first row: the padding covers other experts' rows."""
        if self.row_of_place is None:
            return torch.split_with_sizes(values_R[self.rows], self.sizes)
        pairs = zip(self.starts, self.sizes, strict=True)
        return [values_R[start : start + size] for start, size in pairs]

    def taken(self, values_R: Tensor) -> Tensor:
        """A value per row, (R,) -> (P,)."""
        if self.row_of_place is None:
            return values_R[self.rows]
        return values_R.index_select(0, self.row_of_place)

    def without_padding(self, values_P: Tensor) -> Tensor:
        """The values with zeros in the padding."""
        return values_P if self.live is None else values_P * self.live


def padded_runs(
    bounds: list[int],
    most_places: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_narrow: bool,
) -> list[PaddedRun]:
    """Neighbouring experts that go through each step together: up to this many places, or one expert."""
    runs: list[list[tuple[int, int, int, int]]] = []
    places = 0
    for e, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == stop:
            continue
        size = gemm_rows(stop - start, device, dtype, is_narrow=is_narrow)
        places += size
        if runs and places <= most_places:
            runs[-1].append((e, start, stop, size))
        else:
            runs.append([(e, start, stop, size)])
            places = size
    return [PaddedRun.of(blocks, device) for blocks in runs]
