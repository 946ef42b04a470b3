"""Activations and their gradients in one compiled pass each."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.calls import calls_of
from tests.support.experts_case import ExpertsCase
from tests.support.poison import poisoned_empty

from expertmesh.config.moe_rules import Activation
from expertmesh.ops.activation import num_branches, pointwise, pointwise_backward
from expertmesh.ops.cpu import compiled_passes
from expertmesh.ops.cpu.activation_passes import Passes, passes_for
from expertmesh.ops.cpu.compiled_loops import DTYPES
from expertmesh.ops.cpu.compiled_passes import CompiledPasses, serves

KINDS = [
    ("swiglu", torch.bfloat16),
    ("clamped_swiglu", torch.bfloat16),
    ("relu2", torch.float32),
    ("geglu", torch.float16),
]
"""Each form, with and without a second branch, and each type: a loop takes a C++ compiler five seconds, and a kind is
two. The other functions are in `make test-all`; their formulas are compared everywhere without a compiler."""
EVERY_KIND = [
    pytest.param(name, dtype, marks=() if (name, dtype) in KINDS else pytest.mark.exhaustive)
    for name in Activation.__args__
    for dtype in DTYPES
]


needs_compiler = pytest.mark.usefixtures("cpp_compiler")


def draw(activation, dtype, num_rows, hidden_dim, num_places):
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    rows_W = torch.randint(0, num_rows, (num_places,), generator=generator).int()
    h_RH = randn(num_rows, num_branches(activation) * hidden_dim)
    s_W = torch.rand(num_places, generator=generator)
    return randn(num_places, hidden_dim), h_RH, rows_W, s_W


def results(passes, call):
    """out, dh and ds of the backward, with memory that shows what is not written."""
    grad_WF, h_RH, rows_W, s_W = call
    W = len(h_RH) if rows_W is None else len(rows_W)
    out_WF = torch.full_like(grad_WF, float("nan"))
    d_h_WH = h_RH.new_full((W, h_RH.shape[1]), float("nan"))
    d_s_W = passes.backward(grad_WF.clone(), h_RH, rows_W, s_W, out_WF, d_h_WH)
    return out_WF, d_h_WH, d_s_W


@needs_compiler
@pytest.mark.parametrize(("activation", "dtype"), EVERY_KIND)
@pytest.mark.parametrize("sizes", [(9, 64, 20), (1, 33, 1), (130, 7, 130), (3, 2, 5)], ids=str)
def test_is_what_the_passes_are(activation, dtype, sizes):
    call = draw(activation, dtype, *sizes)
    wide = [t.double() if t.is_floating_point() else t for t in call]
    blocks = Passes.allocate(activation, call[0], backward=True)
    ours, plain = results(CompiledPasses(activation), call), results(blocks, call)
    exact = results(Passes.allocate(activation, wide[0], backward=True), wide)
    for what, *found in zip(("out", "dh"), ours[:2], plain[:2], exact[:2], strict=True):
        assert_two_times(*found, what=what, dtype=dtype)
    if len(call[0]) > 1:  # one sum alone may be near zero, and the other way's order lucky
        assert_two_times(ours[2], plain[2], exact[2], what="ds", dtype=torch.float32)


@needs_compiler
@pytest.mark.parametrize(("activation", "dtype"), EVERY_KIND)
def test_forward_and_backward_have_the_same_activation(activation, dtype):
    grad_WF, h_RH, _, s_W = draw(activation, dtype, 12, 40, 12)
    out_RF = torch.full((15, 40), float("nan")).to(dtype)
    CompiledPasses(activation).forward(h_RH, s_W, out_RF)
    out_WF, *_ = results(CompiledPasses(activation), (grad_WF, h_RH, None, s_W))
    assert torch.equal(out_RF[:12], out_WF)
    assert out_RF[12:].isnan().all(), "rows behind the last one"
    blocks = torch.empty_like(out_WF)
    Passes.allocate(activation, blocks, backward=False).forward(h_RH, s_W, blocks)
    assert_two_times(out_WF, blocks, blocks.double(), what="out", dtype=dtype)


@needs_compiler
def test_what_they_serve():
    rows_RF = torch.empty(5, 1 << 10)
    of = [type(passes_for("relu2", rows_RF, num_rows=1 << n, backward=True)) for n in (10, 11)]
    assert of == [Passes, CompiledPasses]
    assert serves("swiglu", rows_RF.bfloat16(), num_rows=1 << 12, backward=True)
    assert not serves("swiglu", rows_RF.double(), num_rows=1 << 12, backward=True)
    assert not serves("swiglu", rows_RF[:, :1], num_rows=1 << 22, backward=False)
    assert not serves("swiglu", rows_RF.to("meta"), num_rows=1 << 12, backward=True), "another device"


@needs_compiler
@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("swiglu", torch.bfloat16),
        ("relu2", torch.float32),
        pytest.param("swiglu", torch.float32, marks=pytest.mark.exhaustive),
        pytest.param("relu2", torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("kind", ["uniform", "dropped"])
def test_the_experts_take_them(threshold, kind, activation, dtype, recompute_h):
    shape = (60, 33, 25, 5, 3)
    case = ExpertsCase.draw(shape, kind=kind, activation=activation, dtype=dtype, bias=True)
    threshold(compiled_passes, "SMALLEST", 1)
    with calls_of(Passes.allocate) as others, poisoned_empty():
        found = case.run("torch", recompute_h=recompute_h)
    assert others == []
    case.check(lambda: found)


def test_gelu_is_as_exact_as_pytorchs():
    h = torch.linspace(-14, 14, 100_001)
    ones = torch.ones_like(h)
    plain, exact = (pointwise(t, "gelu") for t in (h, h.double()))
    ours = compiled_passes._pointwise(h, "gelu")
    assert_two_times(ours, plain, exact, what="gelu", dtype=torch.float32)
    plain, exact = (pointwise_backward(t, s, "gelu") for t, s in ((ones, h), (ones.double(), h.double())))
    ours = compiled_passes._pointwise_backward(ones, h, "gelu")
    assert_two_times(ours, plain, exact, what="its slope", dtype=torch.float32)
