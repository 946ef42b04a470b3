"""The routing kernels' variants, ready to be compiled ahead of time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from expertmesh.kernels import combine, permute, route_metadata, topk
from tests.support.aot import Build, build

_INDEX, _COUNT, _NUMBER = "*i32", "i32", "*fp32"
_MAPS = dict.fromkeys(("token_of_row_ptr", "slot_of_row_ptr", "row_of_slot_ptr"), _INDEX)
_MANY_TOKENS, _WIDTH = 65536, 4096
_MOST_BINS_OF_FOUR_WARPS = 1024


@dataclass(frozen=True)
class RoutingCase:
    """One variant of one kernel.

    Attributes:
        name: of the kernel, then of the variant.
        kernel: the `@triton.jit` function.
        types: as `aot.build` takes them.
        constants: as `aot.build` takes them.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]

    def build(self, target: str) -> Build:
        """Compile for a target with the warps that the host functions choose."""
        few = 1 if self.name.startswith("tile_table") else 4
        large = self.constants.get("BINS", 0) > _MOST_BINS_OF_FOUR_WARPS
        return build(self.kernel, target, self.types, self.constants, num_warps=8 if large else few)


def _counts(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, _COUNT)


def metadata_cases(ids: str, num_experts: int, bins: int) -> Iterator[RoutingCase]:
    """The kernels of `route_metadata` for ids of a type ("*i32", "*i64") and counters in `bins` bins."""
    sizes = {"E": num_experts, "BINS": bins}
    tiles = {**sizes, "TILE": 1024}
    m, label = route_metadata, f"{num_experts}-{ids[1:]}"
    yield RoutingCase(
        f"count-{label}",
        m._count_tile,
        {"ids_ptr": ids, "counts_ptr": _INDEX, **_counts("num_slots", "num_tiles")},
        tiles,
    )
    yield RoutingCase(
        f"place_tile-{label}",
        m._place_tile,
        {"ids_ptr": ids, "before_ptr": _INDEX, "totals_ptr": _INDEX, "offsets_ptr": _INDEX, **_MAPS}
        | _counts("num_slots", "num_rows", "num_tiles"),
        {**tiles, "K": 8},
    )
    yield RoutingCase(
        f"place_all-{label}",
        m._place_all,
        {"ids_ptr": ids, "offsets_ptr": _INDEX, **_MAPS, **_counts("num_slots", "num_rows")},
        {**tiles, "K": 8},
    )
    yield RoutingCase(
        f"tile_table-{num_experts}",
        m._fill_tile_table,
        {"offsets_ptr": _INDEX, "tile_expert_ptr": _INDEX, "tile_row_ptr": _INDEX}
        | {"num_tiles_ptr": _INDEX, "max_tiles": _COUNT},
        {**sizes, "BLOCK_M": 128, "BLOCK": 128},
    )
    yield RoutingCase(
        f"prefix-{label}",
        m._prefix_tiles,
        {"counts_ptr": _INDEX, "totals_ptr": _INDEX, "num_tiles": _COUNT},
        {"BLOCK": 1024},
    )


def _case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    optional: dict[str, bool],
) -> RoutingCase:
    """A case whose optional FP32 pointers are there or None."""
    there = {key: _NUMBER for key, present in optional.items() if present}
    none = {key: None for key, present in optional.items() if not present}
    return RoutingCase(name, kernel, {**types, **there}, {**constants, **none})


def row_cases(dtype: str, top_k: int) -> Iterator[RoutingCase]:
    """The kernels that move and add rows of a type."""
    pointer = "*" + dtype
    label = f"{dtype}-{top_k}"
    accumulator = tl.float64 if dtype == "fp64" else tl.float32
    rows, width = combine.row_tile(_MANY_TOKENS, _WIDTH, int(dtype.lstrip("bfp")) // 8)
    tail = {"bound": _INDEX, "row_of_slot_ptr": _INDEX, "out_ptr": pointer, "D": _COUNT}
    yield RoutingCase(
        f"sum-{label}",
        combine._sum_rows,
        {"y_ptr": pointer, **tail, "num_tokens": _COUNT},
        {"BLOCK_D": width, "ACCUMULATOR": accumulator, "K": top_k, "UNROLL": min(top_k, 8)}
        | {"BOUND_ON_DEVICE": True, "BLOCK_T": rows},
    )
    yield RoutingCase(
        f"spread-{label}",
        permute._spread_rows,
        {"x_ptr": pointer, **tail, **_counts("num_tokens", "num_rows")},
        {"BLOCK_D": width, "K": top_k, "BLOCK_T": rows},
    )


def choice_cases(function: str, lanes: int, top_k: int, groups: int, *, extras: bool) -> Iterator[RoutingCase]:
    """The choice of experts and its gradient; extras: with noise and bias."""
    label = f"{function}-{lanes}-{top_k}-{groups}"
    rule = {"E": lanes, "K": top_k, "FUNCTION": function, "NORMALIZE": True}
    rule |= {"COLUMNS": top_k, "BLOCK_T": max(1024 // lanes, 1)}
    pointers = {"logits_ptr": _NUMBER, "ids_ptr": "*i64", "num_tokens": _COUNT, "scale": "fp32"}
    yield _case(
        f"choose-{label}",
        topk._choose,
        {**pointers, "weights_ptr": _NUMBER, "scores_ptr": _NUMBER},
        {
            **rule,
            "GROUPS": groups,
            "LIMIT": groups // 2 or 1,
            "BEST": 2,
            "G": groups,
            "S": lanes // groups,
        },
        {"noise_ptr": extras, "bias_ptr": extras},
    )
    yield RoutingCase(
        f"choose_backward-{label}",
        topk._choose_backward,
        {**pointers, "d_weights_ptr": _NUMBER, "d_scores_ptr": _NUMBER, "d_logits_ptr": _NUMBER},
        {**rule, "LANES": lanes},
    )


def main_cases() -> dict[str, RoutingCase]:
    """One variant of every kernel, by the kernel's part of the name."""
    cases = (
        *metadata_cases("*i64", 64, 128),
        *row_cases("bf16", 8),
        *choice_cases("sigmoid", 256, 8, 8, extras=True),
    )
    return {case.name.split("-")[0]: case for case in cases}


def further_cases() -> tuple[RoutingCase, ...]:
    """The other variants: types, choices, tables of the largest sizes."""
    return (
        *row_cases("fp64", 2),
        *choice_cases("softmax", 64, 2, 1, extras=False),
        *metadata_cases("*i32", 8, 64),
        *metadata_cases("*i64", 1024, 2048),
        *row_cases("fp16", 1),
        *row_cases("fp32", 40),
        *choice_cases("softmax_after_topk", 1024, 16, 1, extras=True),
    )
