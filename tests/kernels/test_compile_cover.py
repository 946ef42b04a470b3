"""A covering set of builds: every kernel, target, type and kind of tile in at most 50 builds, without a GPU.

Every launched kernel is built for an NVIDIA target, the GEMMs for all four targets, and the variants where code
generation differs most for Hopper. The full tables are in test_compile_moe.py and test_compile_routing.py.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.support.aot import TARGETS
from tests.support.build_rules import BULK_COPY, check_experts, check_router, check_routing
from tests.support.experts_builds import GEMMS, router_launches, step_launches
from tests.support.routing_builds import main_cases

import expertmesh.kernels

MOST_BUILDS = 50
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# names of launches in the order of a training step; "rows" and "rows_transposed" are launched twice
UP, DOWN, INPUT, HIDDEN = ("up", 0), ("rows", 0), ("rows", 1), ("hidden_grad", 0)
W_OUT, W_IN = ("rows_transposed", 0), ("rows_transposed", 1)
MAIN = {}
DECODE = {"shape": (4, 2048, 768, 64, 8)}
ODD = {"shape": (4096, 1001, 333, 61, 2)}
NARROW = {"shape": (8192, 512, 256, 64, 2), "accumulate": True}  # hot experts' gradients are split
GEGLU = {"activation": "geglu", "interleaved": True}
PLAIN = {"activation": "gelu", "bias": True}

EXPERTS = [
    ("sm_90", BF16, MAIN, (UP, DOWN)),
    ("sm_80", BF16, MAIN, (UP, W_IN)),
    ("sm_100", BF16, MAIN, (UP, INPUT, HIDDEN, W_OUT)),
    ("gfx942", BF16, MAIN, (UP, DOWN, W_IN)),
    ("sm_90", BF16, DECODE, (UP, DOWN)),
    ("sm_90", BF16, {"table": "two-programs"}, (HIDDEN,)),
    ("sm_90", BF16, {"table": "flat"}, (DOWN,)),
    ("sm_90", BF16, {"table": "direct-stores"}, (UP,)),
    ("sm_90", BF16, ODD, (W_OUT,)),
    ("sm_90", BF16, NARROW, (W_IN, ("cut_pieces", 0), ("add_pieces", 0))),
    ("sm_90", FP32, {"precision": "ieee"}, (UP,)),
    ("sm_90", FP32, {"precision": "tf32"}, (HIDDEN,)),
    ("sm_80", FP16, PLAIN, (INPUT, HIDDEN, ("routing_weight_grad", 0), ("sum_columns", 0))),
    ("gfx942", FP16, GEGLU, (HIDDEN,)),
]
ROUTING = {
    "sm_80": ("place_all", "choose_backward"),
    "sm_90": ("count", "place_tile", "sum", "spread", "choose"),
    "sm_100": ("tile_table", "prefix"),
    "gfx942": ("count", "sum"),
}


@cache
def recorded(target, dtype, options):
    return step_launches(target, dtype, **dict(options))


USUAL, MANY = (8192, 2048, 128), (65_536, 7168, 256)
ROUTER = (
    ("sm_80", 1, USUAL),
    ("sm_90", 0, USUAL),
    ("sm_90", 3, USUAL),
    ("sm_90", 4, USUAL),
    ("sm_100", 4, MANY),
    ("gfx942", 3, USUAL),
)
"""Of a router step's launches, for tokens, width and experts: weight in parts, logits, weight and gradient in parts,
both gradients."""


def launch_of(target, dtype, options, name, number):
    """The launch of that number with that name in the step."""
    launches = recorded(target, dtype, tuple(sorted(options.items())))
    return [launch for launch in launches if launch.name == name][number]


def expert_builds():
    for target, dtype, options, names in EXPERTS:
        for name, number in names:
            yield target, dtype, options, name, number


def label(build):
    target, dtype, options, name, number = build
    variant = "-".join(f"{key}={value}" for key, value in options.items()).replace(" ", "")
    return f"{target}-{str(dtype).removeprefix('torch.')}-{name}-{number}-{variant or 'main'}"


@pytest.mark.parametrize("build", list(expert_builds()), ids=label)
def test_experts_build(build):
    target, dtype, options, name, number = build
    launch = launch_of(*build)
    made = launch.build(target)
    half = dtype != FP32
    check_experts(launch, made, matrix=half)
    hopper_path = target == "sm_90" and half and options is not ODD
    if name in GEMMS and hopper_path:
        assert BULK_COPY in made.assembly
        if name != "rows":  # the others read rows by index
            assert "cp.async.cg" in made.assembly


@pytest.mark.parametrize(("target", "name"), [(target, name) for target, names in ROUTING.items() for name in names])
def test_routing_builds(target, name):
    case = main_cases()[name]
    check_routing(case, case.build(target))


@pytest.mark.parametrize(("target", "number", "shape"), ROUTER)
def test_router_builds(target, number, shape):
    launch = router_launches(target, shape)[number]
    check_router(launch, launch.build(target))


def test_the_set_is_small_and_covers_everything():
    experts = list(expert_builds())
    routing = [(target, name) for target, names in ROUTING.items() for name in names]
    router = {(target, router_launches(target, shape)[number].key) for target, number, shape in ROUTER}
    keys = {(build[0], launch_of(*build).key) for build in experts} | set(routing) | router
    assert len(keys) == len(experts) + len(routing) + len(ROUTER), "a build is listed twice"
    assert len(keys) <= MOST_BUILDS
    gemms = {(target, name) for target, _, _, name, _ in experts if name in GEMMS}
    assert gemms == {(target, name) for target in TARGETS for name in GEMMS}
    assert {target for target, _ in routing} == set(TARGETS)
    built = {launch_of(*build).kernel.__name__ for build in experts if build[0] != "gfx942"}
    built |= {main_cases()[name].kernel.__name__ for target, name in routing if target != "gfx942"}
    built |= {router_launches(target)[number].kernel.__name__ for target, number, _ in ROUTER}
    folder = Path(expertmesh.kernels.__file__).parent
    launched = set()
    for file in folder.glob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(_\w+),", file.read_text()))
    # built in test_quantized_kernels.py, test_paged_attention_kernels.py and test_weighted_activation.py
    elsewhere = {"_quantized_product", "_widen", "_attend", "_merge_parts", "_activated", "_activated_backward"}
    assert built == launched - elsewhere
