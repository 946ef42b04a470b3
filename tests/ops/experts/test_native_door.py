"""What reaches the kernels in C: only tensors whose sizes agree and whose memory is what they say."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from expertmesh.errors import ConfigError
from expertmesh.moe.experts import GroupedExperts
from expertmesh.ops.experts import native
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS
from expertmesh.ops.plain_call import runs_plainly

E, G, D, H = 4, 2, 32, 64


def experts(dtype=torch.bfloat16, **changes):
    made = GroupedExperts(num_experts=E, dim=D, hidden_dim=H, activation="swiglu", bias=True)
    made = made.to(dtype).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for name, shape in changes.items():
        setattr(made, name, torch.nn.Parameter(torch.randn(shape).to(dtype)))
    return made


def called(made, x=5, ids=(5, 2), weights=(5, 2)):
    rows = torch.randn(x, D).to(made.w_in.dtype)
    with torch.no_grad():
        return made(rows, torch.zeros(ids, dtype=torch.int64), torch.rand(weights), max_rows=None)


@pytest.mark.parametrize(
    ("changes", "call", "said"),
    [
        ({}, {"x": 3}, "."),
        ({}, {"x": 9}, "."),
        ({}, {"weights": (5, 1)}, "it must be"),
        ({}, {"weights": (2, 2)}, "weights has shape"),
        ({"b_in": (E, G, 8)}, {}, "b_in has shape"),
        ({"b_in": (E, 1, H)}, {}, "b_in has shape"),
        ({"b_out": (E, 8)}, {}, "b_out has shape"),
        ({"w_out": (2, D, H)}, {}, "w_out has shape"),
        ({"w_out": (E, D, 32)}, {}, "w_out has shape"),
        ({"w_in": (E, 1, H, D)}, {}, "w_in has shape"),
        ({"w_in": (E, G, H, 16)}, {}, "w_in has shape"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(changes, call, said):
    with pytest.raises((ConfigError, IndexError), match=said):
        called(experts(**changes), **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_whose_rows_are_one_row_are_read(dtype):
    one = torch.randn(1, D).to(dtype)
    x = torch.randn(3, D).to(dtype)
    y = invariant.plain_linear(x, one.expand(8, D), None, "torch")
    assert torch.equal(y, invariant.plain_linear(x, one.repeat(8, 1), None, "torch"))
    made = experts(dtype)
    row = torch.randn(1, 1, 1, D).to(dtype)
    made.w_in = torch.nn.Parameter(row.expand(E, G, H, D))
    torch.manual_seed(0)
    found = called(made)
    made.w_in = torch.nn.Parameter(row.repeat(E, G, H, 1))
    torch.manual_seed(0)
    assert torch.equal(found, called(made))


def test_products_of_nothing_are_zero():
    y = invariant.plain_linear(torch.randn(3, 0), torch.randn(4, 0), None, "torch")
    assert torch.equal(y, torch.zeros(3, 4))


@pytest.mark.parametrize("ops", [DEFAULT_OPS, BATCH_INVARIANT_OPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "biases"), [(64, 8), (D, 3)])
def test_a_product_of_sizes_that_do_not_agree_is_refused(ops, dtype, columns, biases):
    x, w, b = torch.randn(3, D), torch.randn(8, columns), torch.randn(biases)
    with torch.no_grad(), pytest.raises(RuntimeError if columns == D else Exception):
        ops.linear(x.to(dtype), w.to(dtype), b.to(dtype))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_memory_that_is_not_what_a_tensor_says_is_not_read():
    x, w = torch.randn(3, D).bfloat16(), torch.randn(8, D).bfloat16()
    assert torch.equal(DEFAULT_OPS.linear(torch._neg_view(x), w), DEFAULT_OPS.linear(-x, w))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert not runs_plainly(dual)
        y, tangent = forward_ad.unpack_dual(DEFAULT_OPS.linear(dual, w))
    assert torch.equal(tangent, F.linear(torch.ones_like(x), w))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_biases_of_quantised_experts_have_the_type_of_the_products(format):
    """Under autocast as well, where a call that wants gradients, or has an adapter beside it, takes the other way
    in."""
    made = experts(torch.float32)
    made.convert(format, group_size=32)
    made.arithmetic = BATCH_INVARIANT_OPS
    x, ids, weights = torch.randn(6, D), torch.arange(12).view(6, 2) % E, torch.rand(6, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            alone = made(x, ids, weights, max_rows=None)
        beside = made(x.requires_grad_(), ids, weights, max_rows=None)
    assert torch.equal(alone, beside.detach())


def test_a_cast_takes_the_biases_of_quantised_experts_along():
    made = experts(torch.float32)
    made.convert("int8")
    scales = made.w_in_scale.clone()
    made.bfloat16()
    assert made.b_in.dtype == made.b_out.dtype == torch.bfloat16
    assert torch.equal(made.w_in_scale, scales) and made.w_in.dtype == torch.int8
    x = torch.randn(3, D).bfloat16().requires_grad_()
    made(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), max_rows=None).sum().backward()
    assert x.grad is not None


def test_numbers_that_are_not_finite_are_not_rounded():
    for format in ("int8", "fp8", "mxfp4"):
        made = experts(torch.float32)
        with torch.no_grad():
            made.w_out[1, 0, 0] = torch.nan
        with pytest.raises(ConfigError, match="w_out has numbers that are not finite"):
            made.convert(format)
        assert made.format == "dense"


def test_the_kernels_take_what_fits():
    """So that the table above refuses for its sizes alone."""
    if not native.is_loaded():
        pytest.skip("no C compiler")
    assert called(experts()).isfinite().all()
