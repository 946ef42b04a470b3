"""Tiles measured on a GPU, by architecture and shape, read from a JSON file that a sweep writes.

The file `measured_tiles.json` beside this module has the form `{"sm_90": [entry, ...]}`. An entry holds the measured
shape (`rows_per_expert`, `dim`, `hidden_dim`, `num_branches`, `dtype`), the `tiles` of the six GEMMs by their names in
`LaunchConfig`, and their origin (`source`).
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured_tiles.json")
_NEAR = 2.0
"""Largest ratio between an entry's rows per expert and a call's, in either direction."""


@dataclass(frozen=True)
class Measured:
    """Entry of the file: `tiles` by the GEMM's name in `LaunchConfig`, then by `Tile`'s attributes; other attributes as
    in the file."""

    rows_per_expert: float
    dim: int
    hidden_dim: int
    num_branches: int
    dtype: str
    tiles: dict[str, dict[str, Any]]
    source: str


@cache
def entries(file: Path = FILE) -> dict[str, tuple[Measured, ...]]:
    """Entries by architecture; {} without a file."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    names = Measured.__dataclass_fields__
    return {
        arch: tuple(Measured(**{name: entry[name] for name in names}) for entry in listed)
        for arch, listed in found.items()
    }


def nearest(
    arch: str,
    dtype: str,
    *,
    rows_per_expert: float,
    dim: int,
    hidden_dim: int,
    num_branches: int,
    file: Path = FILE,
) -> Measured | None:
    """Entry for these widths with the nearest rows per expert, within a factor of two; None if there is none."""
    rows = max(rows_per_expert, 1e-9)

    def distance(entry: Measured) -> float:
        return max(entry.rows_per_expert / rows, rows / entry.rows_per_expert)

    fitting = [
        entry
        for entry in entries(file).get(arch, ())
        if (entry.dim, entry.hidden_dim, entry.num_branches, entry.dtype) == (dim, hidden_dim, num_branches, dtype)
        and distance(entry) <= _NEAR
    ]
    return min(fitting, key=distance, default=None)
