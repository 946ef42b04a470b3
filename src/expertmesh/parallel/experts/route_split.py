"""Split of a forward between sending tokens and gathering weights.

The W ranks of one replica hold the experts as e parts along E times f slices along F. A `RouteSplit` factors W into
route_degree x gather: tokens travel over `route_degree` ranks, and each rank gathers the weights of W / route_degree
ranks. route_degree = W moves no weights (expert parallelism, with slicing where f > 1); route_degree = 1 moves no
tokens (data parallelism with sharded weights). In between, gathering joins slices of the same experts first, because a
sliced expert costs one copy of each of its tokens per slice.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from expertmesh.comm.mesh import ExpertDegrees, divisors
from expertmesh.errors import ConfigError


@dataclass(frozen=True)
class RouteSplit:
    """Split of the storage ranks; the same on all ranks."""

    storage: ExpertDegrees  # how the ranks hold the experts
    route_degree: int  # ranks that a token may travel over

    @cached_property
    def gather_f(self) -> int:
        """Number of slices that a rank gathers."""
        return math.gcd(self.storage.num_ranks // self.route_degree, self.storage.f)

    @cached_property
    def gather_e(self) -> int:
        """Number of parts of the experts that a rank gathers."""
        return self.storage.num_ranks // self.route_degree // self.gather_f

    @property
    def route_e(self) -> int:
        """Number of blocks of experts that tokens choose among."""
        return self.storage.e // self.gather_e

    @property
    def route_f(self) -> int:
        """Number of ranks that each get a copy of a token for their slice; their outputs are summed."""
        return self.storage.f // self.gather_f

    def block(self, rank: int) -> tuple[int, int]:
        """Indices (block of experts, slice) that a rank computes, in range(route_e) and range(route_f)."""
        i, j = self.storage.coordinates(rank)
        return i // self.gather_e, j // self.gather_f

    def gather_cells(self) -> list[list[int]]:
        """Ranks that share their weights; all ranks of a cell have the same block."""
        return self._cells(self.block)

    def route_cells(self) -> list[list[int]]:
        """Ranks that share their tokens; each cell has every block once."""

        def place(rank: int) -> tuple[int, int]:
            i, j = self.storage.coordinates(rank)
            return i % self.gather_e, j % self.gather_f

        return self._cells(place)

    def _cells(self, key) -> list[list[int]]:  # type: ignore[no-untyped-def]
        cells: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.storage.num_ranks):
            cells.setdefault(key(rank), []).append(rank)
        return list(cells.values())


def make_split(storage: ExpertDegrees, route_degree: int | None) -> RouteSplit:
    """Split for a route_degree."""
    W = storage.num_ranks
    if route_degree is None:
        return RouteSplit(storage, W)
    if route_degree < 1 or W % route_degree:
        near = min(divisors(W), key=lambda d: abs(d - route_degree))
        raise ConfigError(
            "route_degree",
            route_degree,
            f"must divide the {W} ranks that hold the experts",
            f"nearest: {near}",
        )
    return RouteSplit(storage, route_degree)
