"""The experts' kernels in Triton's interpreter: the two-times rule for the output and every gradient, outputs
poisoned."""

from dataclasses import replace

import pytest
import torch
from tests.oracle.numerics import assert_differs
from tests.support.experts_case import ExpertsCase, check_together
from tests.support.memory import saved_bytes
from tests.support.poison import poisoned_empty

from expertmesh.errors import ConfigError
from expertmesh.kernels import tile_tables, tiles
from expertmesh.kernels.tiles import Tile
from expertmesh.ops.activation import _INNER
from expertmesh.ops.experts import triton_backend as moe_mlp_triton
from expertmesh.ops.experts.moe_mlp import moe_mlp
from expertmesh.ops.experts.weights import ExpertSlice, Needs

SMALL = Tile(16, 16, 16, 4, 1, group_m=3)


def small_tiles(**more):
    return dict.fromkeys(tile_tables.GEMMS, replace(SMALL, **more))


FEW_CHOICES = 16
"""Fewer gradients of routing weights than these are too few for a largest error to mean something."""


def run_poisoned(case):
    with poisoned_empty():
        return case.run("triton")


def check(shape, **options):
    """The two-times rule; several draws of a shape with few choices are judged together."""
    num_choices = shape[0] * shape[4]
    draws = -(-FEW_CHOICES // num_choices) if num_choices else 1
    check_together([ExpertsCase.draw(shape, **options) for _ in range(draws)], run_poisoned)


# T, D, F, E, K: T = 0 and 1, D and F odd and aligned, E prime and a power of two, K = 1, 2, 8 and E
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((0, 8, 16, 4, 2), "hot"),
        ((1, 5, 3, 7, 2), "uniform"),
        ((7, 33, 65, 3, 3), "uniform"),
        ((7, 64, 64, 8, 8), "uniform"),
        ((48, 24, 40, 5, 2), "zipf"),
        ((48, 17, 16, 4, 1), "hot"),
        ((30, 66, 70, 5, 2), "dropped"),
        ((30, 16, 9, 16, 2), "sparse"),
    ],
)
def test_two_times_rule_in_fp32(shape, kind):
    check(shape, kind=kind, bias=kind == "dropped")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_two_times_rule_in_16_bit(dtype, bias):
    check((60, 72, 40, 5, 2), kind="dropped", dtype=dtype, bias=bias)


@pytest.mark.parametrize("activation", sorted(_INNER))
def test_every_activation(activation):
    check((20, 16, 24, 3, 2), activation=activation, bias=True)


@pytest.mark.parametrize(("activation", "interleaved"), [("swiglu", False), ("swiglu", True), ("relu2", False)])
@pytest.mark.parametrize("more", [{}, {"ragged": True, "tails": True, "fetch": True}], ids=str)
def test_tensor_descriptors_and_small_tiles(use_config, activation, interleaved, more):
    """The Hopper path: several tiles and steps in every direction, tails in all of them."""
    use_config(tma=True, **small_tiles(**more))
    check(
        (30, 24, 40, 3, 2),
        kind="dropped",
        activation=activation,
        bias=True,
        interleaved=interleaved,
    )


def test_interleaved_and_concatenated_weights_give_the_same(use_config):
    case = ExpertsCase.draw((30, 19, 21, 3, 2), kind="dropped", bias=True)
    stored = case.w_in_EGFD.transpose(1, 2).contiguous().transpose(1, 2)
    interleaved = replace(case, w_in_EGFD=stored)
    assert tiles.is_interleaved(stored)
    use_config(**small_tiles())
    a, b = case.run("triton"), run_poisoned(interleaved)
    interleaved.check(lambda: b)
    assert b["w_in"].stride() == stored.stride()
    assert torch.equal(a["y"], b["y"])


def test_bits_do_not_depend_on_the_grid_or_the_run(use_config):
    case = ExpertsCase.draw((20, 16, 20, 3, 2), kind="zipf", bias=True)
    use_config(**small_tiles())
    first = case.run("triton")
    for num_programs in (1, 7):
        use_config(num_programs=num_programs, **small_tiles())
        again = case.run("triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("recompute_h", [False, True])
def test_saved_bytes_are_x_and_h(recompute_h):
    case = ExpertsCase.draw((40, 64, 48, 4, 2))
    x, w_in, w_out, weights, *_ = case.leaves()
    options = {"activation": "swiglu", "backend": "triton", "recompute_h": recompute_h}
    found = saved_bytes(
        lambda: moe_mlp(x, w_in, w_out, weights, case.metadata, **options),
        parameters=(w_in, w_out),
    )
    elements = 40 * 64 + (0 if recompute_h else 2 * 80 * 48)
    metadata = 4 * (4 + 1 + 3 * 80) + 4 * 80
    assert found == 4 * elements + metadata


def parts(case, needs=None):
    experts = ExpertSlice(case.w_in_EGFD, case.w_out_EDF, case.b_in_EGF, case.b_out_ED, case.activation)
    maps = case.metadata
    needs = needs or Needs(True, True, True, True, True, True)
    _, h = moe_mlp_triton.forward(case.x_TD, experts, case.weights_TK, maps, save_h=True)
    _, _, hidden = moe_mlp_triton.data_grads(case.grad_TD, case.x_TD, h, experts, case.weights_TK, maps, needs)
    return (case.grad_TD, case.x_TD, hidden, experts, case.weights_TK, maps, needs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_later_and_into_fp32_buffers(dtype):
    case = ExpertsCase.draw((20, 16, 24, 4, 2), kind="sparse", bias=True, dtype=dtype)
    together = case.run("triton")
    arguments = parts(case)
    with poisoned_empty():
        apart = moe_mlp_triton.weight_grads(*arguments)
    names = {"w_in": "w_in_EGFD", "w_out": "w_out_EDF", "b_in": "b_in_EGF", "b_out": "b_out_ED"}
    into = ExpertSlice(*(torch.randn(getattr(apart, f).shape) for f in names.values()), case.activation)
    before = {name: getattr(into, field).clone() for name, field in names.items()}
    moe_mlp_triton.weight_grads(*arguments, into=into)
    for name, field in names.items():
        grad = getattr(apart, field)
        assert torch.equal(grad, together[name]), name
        added = getattr(into, field) - before[name]
        assert_differs(getattr(into, field), before[name], what=name)
        untouched = (grad == 0).flatten(1).all(1)
        assert torch.equal(getattr(into, field)[untouched], before[name][untouched])
        # the buffer is FP32, so the sum of a BF16 layer is not rounded to BF16
        assert torch.equal(added.to(dtype).float().sign(), grad.float().sign()), name


def test_only_what_is_needed_is_computed():
    case = ExpertsCase.draw((12, 8, 16, 3, 2))
    x, w_in, w_out, weights, *_ = case.leaves()
    full = case.run("triton")
    y = moe_mlp(x, w_in, w_out, weights, case.metadata, activation="swiglu", backend="triton")
    for leaf, name in ((x, "x"), (w_in, "w_in"), (w_out, "w_out"), (weights, "weights")):
        (grad,) = torch.autograd.grad(y, leaf, case.grad_TD, retain_graph=True)
        assert torch.equal(grad, full[name])
    hidden = parts(case, Needs(False, False, False, True, False, False))[2]
    assert hidden.a_RF is None
    assert hidden.d_h_RH is None


@pytest.mark.parametrize(("interleaved", "save_h"), [(False, True), (True, False)])
def test_opcheck(interleaved, save_h):
    case = ExpertsCase.draw((6, 8, 16, 3, 2), bias=True, interleaved=interleaved)
    x, w_in, w_out, weights, b_in, b_out = case.leaves()
    maps = list(vars(case.metadata).values())
    args = (
        x,
        weights,
        [w_in],
        [w_out],
        [b_in],
        [b_out],
        [],
        maps,
        "swiglu",
        "dense",
        "triton",
        False,
        [],
        save_h,
    )
    torch.library.opcheck(torch.ops.expertmesh.moe_mlp.default, args)


def test_double_backward_and_fp64_are_errors():
    case = ExpertsCase.draw((4, 8, 16, 2, 1))
    x, w_in, w_out, weights, *_ = case.leaves()
    y = moe_mlp(x, w_in, w_out, weights, case.metadata, activation="swiglu", backend="triton")
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()
    with pytest.raises(ConfigError, match="float64"):
        case.run("triton", torch.float64)


@pytest.fixture
def _own_precision():
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = before


def allow_by(switch, allowed):
    if switch == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision("high" if allowed else "highest")
    elif switch == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = allowed
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"


@pytest.mark.usefixtures("_own_precision")
@pytest.mark.parametrize("switch", ["set_float32_matmul_precision", "allow_tf32", "fp32_precision"])
def test_fp32_products_are_ieee_unless_pytorch_allows_tf32(switch):
    sizes = {"num_rows": 64, "num_experts": 4, "dim": 64, "hidden_dim": 64, "num_branches": 2}

    def precision(dtype):
        return tiles.choose_config(torch.device("cpu"), dtype, **sizes).precision

    assert precision(torch.float32) == "ieee"
    allow_by(switch, True)
    assert precision(torch.float32) == "tf32"
    assert precision(torch.bfloat16) == "ieee"
    allow_by(switch, False)
    assert precision(torch.float32) == "ieee"
