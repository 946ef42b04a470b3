"""What a kernel compiled ahead of time must look like: matrix units, asynchronous copies, registers, no atomics."""

import re

from expertmesh.kernels.tiles import SHARED_BYTES, SHARED_BYTES_KEPT, Tile, shared_bytes
from tests.support.aot import Build
from tests.support.experts_builds import GEMMS
from tests.support.launches import Launch
from tests.support.routing_builds import RoutingCase

MATRIX_INSTRUCTION = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}
_ROWS_OF_UNIT = {"sm_80": 16, "sm_90": 64, "sm_100": 64, "gfx942": 16}
"""Rows of the matrix unit's smallest product: lower tiles are multiplied otherwise."""
BULK_COPY = "cp.async.bulk.tensor"
"""The copies of the Hopper path, by descriptor."""
_BULK_STORE = r"cp\.async\.bulk\.tensor\.[45]d\.global"
_STORED_FROM = r"ttng\.async_tma_copy_local_to_global %\w+\[[^\]]*\] (%\w+)"
_FETCH = "prefetch.global.L2"
_ONE_BY_ONE = r"\bst\.shared\.b16|\bcvt\.rn\.bf16\.f32|\bdiv\.full"
"""What the epilogue of SwiGLU should not do: numbers one by one into shared memory; roundings and divisions by the
special unit."""
MOST_SPILL_BYTES = 48
"""Per thread, stores and loads together, in the experts' kernels: six registers, outside the main loop."""
MOST_CANDIDATES_SPILL_BYTES = 128
"""Of tables beside the default one, which a sweep of the race measures, spills named."""
MOST_WEIGHT_GRAD_REGISTERS = 248
"""Of 255 with descriptors, without a spill."""
MOST_ROUTING_SHARED_BYTES = 16 * 1024
MOST_ROUTING_REGISTERS = 128
"""Two programs of eight warps, or four of four, fit a multiprocessor."""
MOST_LARGEST_REGISTERS = 168
"""Three programs of four warps fit: for rows or counts of 1024 experts, which a program holds whole, and on AMD."""
MOST_LARGEST_REGISTERS_AMD = 304
"""Of 512, accumulators included: for rows of 1024 experts."""
_LARGEST_LANES = 1024
GLOBAL_ATOMIC = {
    "sm": r"\b(atom|red)(\.\w+)*\.global",
    "gf": r"\b(global|buffer|flat)_atomic",
}
"""Patterns of atomics between programs by the first two letters of the target."""
_WIDE_ACCESS = {
    "sm": r"(ld|st)\.global(\.\w+)*\.v[248]\.b(32|64)",
    "gf": r"(global|buffer)_(load|store)_dwordx4",
}
_FIT_ANYWAY = 6
_PRODUCT = r"\b(wgmma\.mma_async|mma\.sync)"
_ROW_KERNELS = ("sum", "spread", "dot", "fill")


def check_experts(launch: Launch, build: Build, *, matrix: bool = True, most_spilled: int = MOST_SPILL_BYTES) -> None:
    """Assert the rules of the experts' kernels.

    Args:
        launch: what was compiled.
        build: the result.
        matrix: whether tiles that are high enough must use the target's matrix unit; IEEE FP32 cannot.
        most_spilled: bytes of spills per thread.

    Raises:
        AssertionError: too many spills, too much shared memory, an atomic, or no matrix instruction.
    """
    name = f"{launch.name} for {build.target}"
    assert build.spill_bytes <= most_spilled, f"{name}: {build.spill_bytes} bytes spilled"
    assert build.shared_bytes <= SHARED_BYTES[build.target], f"{name}: {build.shared_bytes} bytes"
    assert not re.search(GLOBAL_ATOMIC[build.target[:2]], build.assembly), f"{name}: atomics"
    if launch.name in GEMMS and launch.values["TMA"]:
        _check_pipeline(name, launch, build)
        if launch.name == "rows_transposed":
            assert build.registers <= MOST_WEIGHT_GRAD_REGISTERS, f"{name}: {build.registers}"
        else:
            _check_results(name, launch, build)
    if launch.name in GEMMS and matrix and launch.values["BLOCK_M"] >= _ROWS_OF_UNIT[build.target]:
        assert MATRIX_INSTRUCTION[build.target] in build.assembly, f"{name}: no matrix unit"


def _check_pipeline(name: str, launch: Launch, build: Build) -> None:
    """One product per height of tiles, in the pipelined loop: no last step that waits for its own loads."""
    dots = re.findall(r"\b(?:ttng\.warp_group_dot|tt\.dot)\s", build.stages["ttgir"])
    products = 1 + launch.values.get("TAILS", False)
    assert len(dots) == products, f"{name}: {len(dots)} products"


def _check_results(name: str, launch: Launch, build: Build) -> None:
    """How results leave: by descriptor from a buffer that the whole loop keeps, and waited for before the next ones
    only."""
    values, text = launch.values, build.stages["ttgir"]
    stores = len(re.findall(_BULK_STORE, build.assembly))
    assert bool(stores) is values["RAGGED"], f"{name}: {stores} stores by descriptor"
    if stores and launch.name == "up" and values["INNER"] == "silu":
        assert not re.search(_ONE_BY_ONE, build.assembly), f"{name}: one number at a time"
    # a buffer without a value of its own is kept by the loop: a store is waited for when the next one needs it
    for buffer in set(re.findall(_STORED_FROM, text)):
        assert f"{buffer} = ttg.local_alloc : ()" in text, f"{name}: a store is waited for at once"
    assert build.shared_bytes <= _needed(launch, build.target) + SHARED_BYTES_KEPT, f"{name}: {build.shared_bytes}"
    if values.get("FETCH"):
        # few rows have no wgmma, and IEEE FP32 no matrix unit
        product = re.search(_PRODUCT, build.assembly)
        fetched = build.assembly.index(_FETCH)
        assert product is None or fetched < product.start(), f"{name}: H is fetched late"


def _needed(launch: Launch, target: str) -> int:
    """The estimate of shared memory that the tile's stages were chosen by; of small tiles, what fits anyway.

    Those lay accumulators out anew in FP32, in more memory than their operands had.
    """
    values, options = launch.values, launch.options
    tile = Tile(
        *(values[f"BLOCK_{side}"] for side in "MNK"),
        options["num_warps"],
        options["num_stages"],
        ragged=values["RAGGED"],
        flatten=values["FLATTEN"],
        # pairs leave by one buffer of twice the columns
        chunk=values.get("CHUNK_N", 0) * (1 + values.get("INTERLEAVED", False)),
    )
    gemm = {"rows": "down"}.get(launch.name, launch.name)
    itemsize, num_branches = values["w"].base.element_size(), values.get("G", 1)
    estimate = shared_bytes(gemm, tile, itemsize, num_branches, tma=True)
    return max(estimate, SHARED_BYTES[target] // _FIT_ANYWAY)


def check_router(launch: Launch, build: Build) -> None:
    """Assert the rules of the router's product: tensor cores, operands copied asynchronously on NVIDIA's, no spills.

    Rows of an odd length are loaded number by number, through registers: they may spill.

    Raises:
        AssertionError: one of them is broken.
    """
    name = f"{launch.name} for {build.target}"
    strides = [value for key, value in launch.values.items() if "_stride_" in key]
    is_aligned = all(n == 1 or n % 8 == 0 for n in strides)
    assert build.spill_bytes == 0 or not is_aligned, f"{name}: {build.spill_bytes} bytes spilled"
    assert build.shared_bytes <= SHARED_BYTES[build.target], f"{name}: {build.shared_bytes} bytes"
    if launch.name == "split_product":
        assert MATRIX_INSTRUCTION[build.target] in build.assembly, f"{name}: no matrix unit"
        if build.target.startswith("sm") and is_aligned:
            assert "cp.async.cg" in build.assembly, f"{name}: copies wait"


def check_routing(case: RoutingCase, build: Build) -> None:
    """Assert the rules of the routing kernels: no spills at all, few registers, 16-byte accesses, no atomics.

    Raises:
        AssertionError: one of them is broken.
    """
    on_amd, constants = build.target.startswith("gfx"), case.constants
    row_lanes = constants.get("LANES", constants.get("G", 0) * constants.get("S", 0))
    largest = row_lanes >= _LARGEST_LANES
    registers = MOST_ROUTING_REGISTERS
    if largest or on_amd or constants.get("BINS", 0) > _LARGEST_LANES:
        registers = MOST_LARGEST_REGISTERS_AMD if largest and on_amd else MOST_LARGEST_REGISTERS
    name = f"{case.name} for {build.target}"
    assert build.spill_bytes == 0, f"{name}: {build.spill_bytes} bytes spilled"
    assert build.registers <= registers, f"{name}: {build.registers} registers"
    assert build.shared_bytes <= MOST_ROUTING_SHARED_BYTES, f"{name}: {build.shared_bytes} bytes"
    assert not re.search(GLOBAL_ATOMIC[build.target[:2]], build.assembly), case.name
    if case.name.split("-")[0] in _ROW_KERNELS:
        wide = re.search(_WIDE_ACCESS[build.target[:2]], build.assembly)
        assert wide, f"{case.name}: no 16-byte accesses"
