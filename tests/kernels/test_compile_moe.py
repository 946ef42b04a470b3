"""The experts' kernels compile ahead of time for every target in every variant: the full table, in `make kernels-all`.

What is built by default is part of the covering set of test_compile_cover.py.
"""

import pytest
import torch
from tests.support.aot import TARGETS
from tests.support.build_rules import MOST_CANDIDATES_SPILL_BYTES, check_experts, check_router
from tests.support.experts_builds import GEMMS, router_launches, step_launches

from expertmesh.kernels import tile_tables

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE = (4, 2048, 768, 64, 8)
ODD = (4096, 1001, 333, 61, 2)
ALIGNED_TAILS = (4096, 1000, 328, 61, 2)
NARROW = (8192, 512, 256, 64, 2)

VARIANTS = {
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
    "tiny": {"shape": (4096, 24, 40, 4, 2)},
    "split": {"shape": NARROW},
    "split-main-grads": {"shape": NARROW, "accumulate": True},
}
FP16_VARIANTS = ("swiglu", "geglu-interleaved", "gelu-bias", "decode", "odd", "split-main-grads")
"""FP16 and BF16 differ in one letter of the instructions: the main variants and the pointer path are enough."""
TYPES = {
    "bf16": (BF16, "ieee", tuple(VARIANTS)),
    "fp16": (FP16, "ieee", FP16_VARIANTS),
    "fp32": (FP32, "ieee", tuple(VARIANTS)),
    "tf32": (FP32, "tf32", tuple(VARIANTS)),
}


def new_launches(target, kind, variant):
    """The launches of a variant that no earlier one compiles."""
    dtype, precision, names = TYPES[kind]
    seen = set()
    for name in names:
        for launch in step_launches(target, dtype, precision=precision, **VARIANTS[name]):
            if launch.key not in seen:
                seen.add(launch.key)
                if name == variant:
                    yield launch


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize(("kind", "variant"), [(kind, name) for kind in TYPES for name in TYPES[kind][2]])
def test_every_variant_builds(target, kind, variant):
    for launch in new_launches(target, kind, variant):
        check_experts(launch, launch.build(target), matrix=TYPES[kind][0] != FP32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("shape", [(8192, 2048, 128), (32_768, 4096, 8), (512, 1001, 61), (65_536, 7168, 256)])
def test_the_router_builds(target, shape):
    for launch in router_launches(target, shape):
        check_router(launch, launch.build(target))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "table"),
    [(target, name) for target in TARGETS for name in tile_tables.TABLES[target]],
)
@pytest.mark.parametrize("variant", ["swiglu", "geglu-interleaved", "gelu-bias", "main-grads", "tails"])
def test_every_table_builds(target, table, variant):
    for launch in step_launches(target, BF16, table=table, **VARIANTS[variant]):
        if launch.name in GEMMS:
            check_experts(launch, launch.build(target), most_spilled=MOST_CANDIDATES_SPILL_BYTES)
