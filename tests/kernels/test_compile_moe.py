"""The experts' kernels compile ahead of time for every target, use its matrix units and asynchronous copies, and do not spill."""

import pytest
import torch

from expertmesh.kernels.tiles import SHARED_BYTES
from expertmesh.testing.aot import TARGETS
from expertmesh.testing.experts_builds import GEMMS, step_launches

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MATRIX_INSTRUCTION = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}
MOST_SPILL_BYTES = 256
"""Per thread, stores and loads together: what a tile's epilogue may lose outside its loop."""
DECODE = (4, 2048, 768, 64, 8)
ODD = (4096, 1001, 333, 61, 2)
ALIGNED_TAILS = (4096, 1000, 328, 61, 2)

SWEEP = {
    "swiglu": {},
    "geglu-interleaved": {"activation": "geglu", "interleaved": True},
    "reglu-bias": {"activation": "reglu", "bias": True},
    "gelu-bias": {"activation": "gelu", "bias": True},
    "relu2": {"activation": "relu2"},
    "recompute": {"recompute_h": True},
    "main-grads": {"accumulate": True, "bias": True},
    "decode": {"shape": DECODE},
    "few-rows": {"shape": (1024, 2048, 768, 64, 8)},
    "odd": {"shape": ODD},
    "tails": {"shape": ALIGNED_TAILS},
    "narrow": {"shape": (4096, 24, 40, 4, 2)},
}


def build_once(launches, target):
    """Builds by kernel and variant; the same variant of a kernel once."""
    seen, builds = set(), []
    for launch in launches:
        constants = {k: v for k, v in launch.values.items() if isinstance(v, (bool, int, str))}
        key = (launch.name, str(sorted(constants.items())), str(sorted(launch.options.items())))
        if key not in seen:
            seen.add(key)
            builds.append((launch, launch.build(target)))
    return builds


def check(launch, build, *, matrix=True):
    target = build.target
    assert build.spill_bytes <= MOST_SPILL_BYTES, f"{launch.name}: {build.spill_bytes} bytes"
    assert build.shared_bytes <= SHARED_BYTES[target], launch.name
    if launch.name in GEMMS and matrix:
        assert MATRIX_INSTRUCTION[target] in build.assembly, launch.name


@pytest.mark.parametrize("target", list(TARGETS))
def test_gemms_build_for_every_target(target):
    launches = step_launches(target, BF16)
    gemms = [launch for launch in launches if launch.name in GEMMS]
    assert len(gemms) == 6
    for launch, build in build_once(gemms, target):
        check(launch, build)


def test_hopper_copies_by_descriptor_and_gathers_asynchronously():
    launches = step_launches("sm_90", FP16, activation="gelu")
    for launch in launches:
        if launch.name not in GEMMS:
            continue
        assembly = launch.build("sm_90").assembly
        assert "wgmma.mma_async" in assembly
        assert "cp.async.bulk.tensor" in assembly, launch.name
        if launch.name != "rows":  # the others read rows by index
            assert "cp.async.cg" in assembly, launch.name


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {"shape": DECODE}),
        (BF16, {"shape": ODD, "bias": True}),
        (FP32, {"precision": "ieee"}),
        (FP32, {"precision": "tf32"}),
    ],
)
def test_variants_build_for_hopper(dtype, options):
    launches = step_launches("sm_90", dtype, **options)
    if not options.get("bias"):  # the one with biases builds the small kernels too
        launches = [launch for launch in launches if launch.name in GEMMS]
    for launch, build in build_once(launches, "sm_90"):
        check(launch, build, matrix=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", list(SWEEP))
def test_every_variant_builds(target, dtype, name):
    matrix = name != "decode"  # wgmma needs 64 rows
    for launch, build in build_once(step_launches(target, dtype, **SWEEP[name]), target):
        check(launch, build, matrix=matrix)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("name", list(SWEEP))
def test_every_fp32_variant_builds(target, precision, name):
    options = SWEEP[name] | {"precision": precision}
    for launch, build in build_once(step_launches(target, FP32, **options), target):
        check(launch, build, matrix=False)
