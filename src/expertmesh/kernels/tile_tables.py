"""Alternative tables of tiles by architecture, as changes of the default table. An environment variable selects one.

`EXPERTMESH_TILES=two-programs` uses that table for every layer. A benchmark sweep times each GEMM with every table of
its architecture. Only tables whose builds were checked (registers, spills, shared memory) are listed.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from expertmesh.errors import ConfigError

FLAG = "EXPERTMESH_TILES"
DEFAULT = "default"
OVER_ROWS = ("up", "down", "hidden_grad", "input_grad")
"""GEMMs that share one table of row tiles, and so one block_m."""
WEIGHT_GRADS = ("w_out_grad", "w_in_grad")
GEMMS = (*OVER_ROWS, *WEIGHT_GRADS)


@dataclass(frozen=True)
class Table:
    """Changes of a table relative to the default one."""

    rows: dict[str, Any] = field(default_factory=dict)  # attributes of `Tile` for the GEMMs over routed rows
    weights: dict[str, Any] = field(default_factory=dict)  # attributes of `Tile` for the weight gradients
    # attributes of `Tile` for single GEMMs; they override `rows` and `weights`
    only: dict[str, dict[str, Any]] = field(default_factory=dict)
    # maximum number of columns of the accumulator, both branches together; None: the default
    columns: int | None = None
    hidden_columns: int = 128  # maximum for `hidden_grad`, whose epilogue also holds H and both gradients
    leaves_low: bool = True  # whether tiles with fewer than 128 rows stay unchanged

    def changes(self, gemm: str, block_m: int, block_n: int, num_branches: int) -> dict[str, Any]:
        """Changes in a GEMM's tile of this size, by attributes of `Tile`; {} if there are none."""
        given = self.rows if gemm in OVER_ROWS else self.weights
        given = given | self.only.get(gemm, {})
        if not given or (self.leaves_low and block_m < 128):
            return {}
        columns = given.get("block_n", block_n)
        if self.columns is not None:
            columns = min(columns, self.columns // (num_branches if gemm == "up" else 1))
        return given | {"block_n": min(columns, block_n)}


def _two_programs(**more: Any) -> Table:
    # 4 warps on 128 x 128 hold as many sums per thread as 8 on 128 x 256; `hidden_grad` has registers for 64 columns
    narrow = {"block_m": 128, "block_k": 64, "num_warps": 4, "num_stages": 3, "programs": 2}
    only = {"up": {"chunk": 32}, "hidden_grad": {"chunk": 16, "block_n": 64}}
    return Table(narrow | more, narrow | {"num_stages": 5}, only, columns=128)


_GROUPS = {f"group-{n}": Table({"group_m": n}, {"group_m": n}, leaves_low=False) for n in (4, 16)}
_FLAT = {"flatten": True, "tails": False}
_DIRECT = {"ragged": False, "tails": False, "fetch": False}
TABLES: dict[str, dict[str, Table]] = {
    "sm_80": _GROUPS,
    "sm_90": {
        "two-programs": _two_programs(tails=False),
        "two-programs-tails": _two_programs(),
        "two-programs-flat": _two_programs(**_FLAT),
        "flat": Table(_FLAT, only={"hidden_grad": {"chunk": 32}}),
        "whole-tails": Table({"tails": False}),
        "direct-stores": Table(_DIRECT, leaves_low=False),
        "3-stages": Table({"num_stages": 3}),
        # a step of 128 x 128 reads 64 bytes per clock from L2, a step of 128 x 256 reads 48
        "wide-hidden": Table(only={"hidden_grad": {"chunk": 16}}, hidden_columns=256, leaves_low=False),
        "half-columns": Table({"num_warps": 8}, {"num_warps": 8}, columns=128),
        "half-rows": Table({"block_m": 64, "tails": False}),
    }
    | _GROUPS,
    "sm_100": _GROUPS,
    "gfx942": _GROUPS,
    "interpreter": {"low-tails": Table({"tails": True}, leaves_low=False)} | _GROUPS,
}
"""Tables by architecture and name, beside the default one; `direct-stores` is Hopper's table without stores by
descriptor."""


def names(arch: str) -> tuple[str, ...]:
    """Names of an architecture's tables, the default one first."""
    return (DEFAULT, *TABLES.get(arch, {}))


def hidden_columns(arch: str, table: str) -> int:
    """Maximum number of columns of `hidden_grad`'s tile in a table of an architecture."""
    return TABLES.get(arch, {}).get(table, Table()).hidden_columns


def selected() -> str:
    """Name of the table that the environment selects; the default one if it selects none."""
    return os.environ.get(FLAG, "") or DEFAULT


def changes(arch: str, table: str, gemm: str, *, block_m: int, block_n: int, num_branches: int) -> dict[str, Any]:
    """Changes of a table in a GEMM's tile, by attributes of `Tile`."""
    if table == DEFAULT:
        return {}
    known = TABLES.get(arch, {})
    if table not in known:
        raise ConfigError(f"{FLAG}={table}: {arch} has no such table of tiles; take one of {', '.join(names(arch))}")
    return known[table].changes(gemm, block_m, block_n, num_branches)
