"""Routing kernels compile for every GPU target, without spills, with wide loads and without global atomics.

No GPU is needed: see expertmesh.testing.aot. By default every kernel is compiled for every target in one variant, and
the variants where code generation differs most for one target of each vendor; the rest is marked slow.
"""

import re

import pytest
import triton.language as tl

from expertmesh.kernels import capacity, combine, permute, route_metadata, topk
from expertmesh.testing.aot import TARGETS, build

MOST_SHARED_BYTES = 16 * 1024
MOST_REGISTERS = 128  # two programs of eight warps, or four of four, per multiprocessor
INDEX, COUNT, NUMBER = "*i32", "i32", "*fp32"
MAPS = dict.fromkeys(("token_of_row_ptr", "slot_of_row_ptr", "row_of_slot_ptr"), INDEX)
BLOCK = {"BLOCK_D": 1024, "ACCUMULATOR": tl.float32}


def counts(*names):
    return dict.fromkeys(names, COUNT)


def metadata_cases(ids, num_experts, bins):
    sizes = {"E": num_experts, "BINS": bins}
    tiles = {**sizes, "TILE": 1024}
    m = route_metadata
    yield (
        f"count-{num_experts}-{ids[1:]}",
        m._count_tile,
        {"ids_ptr": ids, "counts_ptr": INDEX, **counts("num_slots", "num_tiles")},
        tiles,
    )
    yield (
        f"place_tile-{num_experts}-{ids[1:]}",
        m._place_tile,
        {"ids_ptr": ids, "before_ptr": INDEX, "totals_ptr": INDEX, "offsets_ptr": INDEX, **MAPS}
        | counts("num_slots", "num_rows", "num_tiles"),
        {**tiles, "K": 8},
    )
    yield (
        f"place_all-{num_experts}-{ids[1:]}",
        m._place_all,
        {"ids_ptr": ids, "offsets_ptr": INDEX, **MAPS, **counts("num_slots", "num_rows")},
        {**tiles, "K": 8},
    )
    yield (
        f"tile_table-{num_experts}",
        m._fill_tile_table,
        {"offsets_ptr": INDEX, "tile_expert_ptr": INDEX, "tile_row_ptr": INDEX}
        | {"num_tiles_ptr": INDEX, "max_tiles": COUNT},
        {**sizes, "BLOCK_M": 128, "BLOCK": 128},
    )
    yield (
        "prefix",
        m._prefix_tiles,
        {"counts_ptr": INDEX, "totals_ptr": INDEX, "num_tiles": COUNT},
        {"BLOCK": 1024},
    )


def optional(types, constants, name, present, type_name=NUMBER):
    return (
        ({**types, name: type_name}, constants) if present else (types, {**constants, name: None})
    )


def row_cases(dtype, top_k, weighted):
    pointer = "*" + dtype
    label = f"{dtype}-{top_k}-{'weighted' if weighted else 'plain'}"
    tail = {"bound": INDEX, "row_of_slot_ptr": INDEX, "out_ptr": pointer, "D": COUNT}
    block = {**BLOCK, "ACCUMULATOR": tl.float64 if dtype == "fp64" else tl.float32, "K": top_k}
    types, constants = optional(
        {"y_ptr": pointer, **tail, "num_tokens": COUNT},
        {**block, "UNROLL": min(top_k, 8), "BOUND_ON_DEVICE": True, "BLOCK_T": 2},
        "weights_ptr",
        weighted,
    )
    yield f"sum-{label}", combine._sum_rows, types, constants
    types, constants = optional(
        {"x_ptr": pointer, **tail, **counts("num_tokens", "num_rows")},
        {**block, "BLOCK_T": 2},
        "weights_ptr",
        weighted,
    )
    yield f"spread-{label}", permute._spread_rows, types, constants
    yield (
        f"dot-{label}",
        combine._dot_rows,
        {"grad_ptr": pointer, "y_ptr": pointer, **tail, "out_ptr": NUMBER, "num_slots": COUNT},
        {**block, "BOUND_ON_DEVICE": True, "BLOCK_N": 2},
    )
    types, constants = optional(
        {"x_ptr": pointer, "offsets_ptr": INDEX, "out_ptr": pointer, "D": COUNT}
        | {"token_of_row_ptr": INDEX, "slot_of_row_ptr": INDEX}
        | counts("num_rows", "num_places", "capacity"),
        {"ACCUMULATOR": block["ACCUMULATOR"], "BLOCK_C": 2, "BLOCK_D": 1024},
        "weights_ptr",
        weighted,
    )
    yield f"fill-{label}", capacity._fill_places, types, constants


def choice_cases(function, lanes, top_k, groups, *, extras):
    num_experts = lanes
    label = f"{function}-{num_experts}-{top_k}-{groups}"
    rule = {"E": num_experts, "K": top_k, "FUNCTION": function, "NORMALIZE": True}
    rule |= {"COLUMNS": top_k, "BLOCK_T": max(1024 // lanes, 1)}
    pointers = {"logits_ptr": NUMBER, "ids_ptr": "*i64", "num_tokens": COUNT, "scale": "fp32"}
    types = {**pointers, "weights_ptr": NUMBER, "scores_ptr": NUMBER}
    constants = {
        **rule,
        "GROUPS": groups,
        "LIMIT": groups // 2 or 1,
        "G": groups,
        "S": lanes // groups,
    }
    for name in ("noise_ptr", "bias_ptr"):
        types, constants = optional(types, constants, name, extras)
    yield f"choose-{label}", topk._choose, types, constants
    yield (
        f"choose_backward-{label}",
        topk._choose_backward,
        {**pointers, "d_weights_ptr": NUMBER, "d_scores_ptr": NUMBER, "d_logits_ptr": NUMBER},
        {**rule, "LANES": lanes},
    )


PLACES = (
    "places",
    capacity._find_places,
    {"offsets_ptr": INDEX, "row_of_slot_ptr": INDEX, "place_ptr": INDEX}
    | counts("num_slots", "capacity"),
    {"E": 64, "STEPS": 6, "BLOCK": 256},
)
MAIN = [
    *metadata_cases("*i64", 64, 128),
    *row_cases("bf16", 8, weighted=True),
    *choice_cases("sigmoid", 256, 8, 8, extras=True),
    PLACES,
]
VARIANTS = [
    *row_cases("bf16", 8, weighted=False),
    *row_cases("fp64", 2, weighted=True),
    *choice_cases("softmax", 64, 2, 1, extras=False),
]
SLOW = [
    *metadata_cases("*i32", 8, 64),
    *metadata_cases("*i64", 1024, 2048),
    *row_cases("fp16", 1, weighted=False),
    *row_cases("fp32", 40, weighted=True),
    *choice_cases("softmax_after_topk", 1024, 16, 1, extras=True),
]


def parameters():
    slow_first = {"place_all-64-i64": ("sm_80", "sm_100"), "place_tile-64-i64": ("sm_80",)}
    for cases, targets in ((MAIN, TARGETS), (VARIANTS, ("sm_90", "gfx942")), (SLOW, ())):
        for case in cases:
            for target in TARGETS:
                slow = target not in targets or target in slow_first.get(case[0], ())
                marks = [pytest.mark.exhaustive] if slow else []
                yield pytest.param(case, target, id=f"{case[0]}-{target}", marks=marks)


WIDE_ACCESS = {
    "sm": r"(ld|st)\.global(\.\w+)*\.v[248]\.b(32|64)",
    "gf": r"(global|buffer)_(load|store)_dwordx4",
}
GLOBAL_ATOMIC = {
    "sm": r"\b(atom|red)(\.\w+)*\.global",
    "gf": r"\b(global|buffer|flat)_atomic",
}


@pytest.mark.parametrize(("case", "target"), list(parameters()))
def test_builds(case, target):
    name, kernel, types, constants = case
    # as the host functions choose: eight warps for the largest tables only
    num_warps = 8 if constants.get("BINS", 0) > 1024 else 1 if name.startswith("tile_table") else 4
    made = build(kernel, target, types, constants, num_warps=num_warps)
    assert made.spill_bytes == 0
    assert made.registers <= MOST_REGISTERS
    assert made.shared_bytes <= MOST_SHARED_BYTES
    assert not re.search(GLOBAL_ATOMIC[target[:2]], made.assembly)
    if name.startswith(("sum", "spread", "dot", "fill-")):
        assert re.search(WIDE_ACCESS[target[:2]], made.assembly), "no 16-byte accesses"


def test_the_atomic_pattern_finds_atomics():
    # the histogram counts in shared memory: atomics there, none in global memory
    count = MAIN[0]
    for target, pattern in (("sm_90", r"\b(atom|red)(\.\w+)*\.shared"), ("gfx942", r"ds_add")):
        made = build(count[1], target, count[2], count[3])
        assert re.search(pattern, made.assembly)
        assert re.search(GLOBAL_ATOMIC[target[:2]], made.assembly) is None
    assert re.search(GLOBAL_ATOMIC["sm"], "atom.global.add.u32 %r1, [%rd1], 1;")
    assert re.search(GLOBAL_ATOMIC["sm"], "red.relaxed.gpu.global.add.f32 [%rd1], %f1;")
    assert re.search(GLOBAL_ATOMIC["gf"], "\tglobal_atomic_add_f32 v0, v1, s[0:1]")


def test_aot_names_wrong_arguments():
    with pytest.raises(AssertionError, match="num_tiles"):
        build(MAIN[0][1], "sm_90", {"ids_ptr": "*i64"}, {})
