"""Operations along rows by the kernels in C: with every instruction set, the same bits beside any rows, and ordinary
gradients."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times, sums_of_terms
from tests.support.poison import poisoned_empty

from expertmesh.models.attention import apply_rope
from expertmesh.ops import native_rows
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS, TRAINING_OPS

pytestmark = pytest.mark.usefixtures("instructions")
TYPES = (torch.bfloat16, torch.float32)
WIDTHS = (2, 6, 32, 66, 514)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_and_rope(x_RN, *, weight=None):
    """One head of each position."""
    num, width = x_RN.shape
    angle = randn(300, width // 2, seed=1)[:num]
    weight = randn(width, seed=2).to(x_RN) if weight is None else weight
    how = {"eps": 1e-6, "cos": angle.cos(), "sin": angle.sin()}
    return native_rows.norm_and_rope(x_RN.view(num, 1, 1, width), weight, **how)[:, 0]


def plain_norm_and_rope(x_RN, *, weight=None):
    num, width = x_RN.shape
    angle = randn(300, width // 2, seed=1)[:num].to(x_RN.dtype)
    weight = randn(width, seed=2).to(x_RN) if weight is None else weight
    n = x_RN / (x_RN.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    return apply_rope(n, angle.cos(), angle.sin())


def rms_norm(x_RN):
    return native_rows.rms_norm(x_RN, randn(x_RN.shape[1], seed=3).to(x_RN), eps=1e-6)


def plain_rms_norm(x_RN):
    weight = randn(x_RN.shape[1], seed=3).to(x_RN)
    return x_RN / (x_RN.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


OPERATIONS = {
    "rms_norm": (rms_norm, plain_rms_norm, TYPES),
    "norm_and_rope": (norm_and_rope, plain_norm_and_rope, TYPES),
    "softmax": (native_rows.softmax, lambda x: x.softmax(-1), (torch.float32,)),
    "row_sum": (native_rows.row_sum, lambda x: x.sum(-1, keepdim=True), (torch.float32,)),
}
CASES = [(name, dtype) for name, (*_, dtypes) in OPERATIONS.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_agrees_with_plain_formulas(name, dtype):
    run, plain, _ = OPERATIONS[name]
    for width in WIDTHS:
        x = randn(37, width, dtype=dtype)
        with poisoned_empty():
            found = run(x)
        exact = plain(x.double())
        ordinary = plain(x.float()).to(found.dtype)
        more = {"sums": sums_of_terms(x.double(), 1)} if name == "row_sum" else {}
        if more:
            found, ordinary, exact = (t[:, 0] for t in (found, ordinary, exact))
        assert_two_times(found, ordinary, exact, what=f"{name} {width}", dtype=dtype, **more)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_row_has_the_same_bits_beside_any_rows_and_with_every_number_of_threads(name, dtype):
    run = OPERATIONS[name][0]
    for width in WIDTHS:
        x = randn(300, width, dtype=dtype)
        whole = run(x)
        for size in (1, 2, 7, 64, 255):
            assert torch.equal(run(x[:size]), whole[:size])
        before = torch.get_num_threads()
        torch.set_num_threads(3 - min(before, 2))
        try:
            assert torch.equal(run(x), whole)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_those_of_the_plain_formula_twice(name):
    run, plain, _ = OPERATIONS[name]
    x = randn(6, 10).requires_grad_()
    found, expected = [], []
    for of, into in ((run, found), (plain, expected)):
        (first,) = torch.autograd.grad(of(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x)
        into += [first.detach(), second]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    weight = randn(10, seed=4).requires_grad_()
    if name == "norm_and_rope":
        pair = [torch.autograd.grad(of(x, weight=weight).sum(), weight)[0] for of in (run, plain)]
        torch.testing.assert_close(*pair)


def test_heads_in_two_axes_turn_by_their_tokens_position():
    qkv_THGd, weight, angle = randn(6, 2, 4, 16), randn(16, seed=1), randn(3, 8, seed=2)
    how = {"eps": 1e-6, "cos": angle.cos(), "sin": angle.sin()}
    found = native_rows.norm_and_rope(qkv_THGd[:, :, 1:3], weight, **how)
    for token in range(6):
        own = {"eps": 1e-6} | {key: how[key][token % 3 :][:1] for key in ("cos", "sin")}
        alone = qkv_THGd[token : token + 1, :, 1:3].clone()
        assert torch.equal(found[token], native_rows.norm_and_rope(alone, weight, **own)[0])
    bare = native_rows.norm_and_rope(qkv_THGd, None, **how)
    cos, sin = (how[key].repeat(2, 1)[:, None] for key in ("cos", "sin"))
    torch.testing.assert_close(bare, apply_rope(qkv_THGd.flatten(1, 2), cos, sin))


def test_rows_that_are_not_finite_stay_alone_and_no_choice_is_zero():
    x = randn(9, 33)
    plain = native_rows.softmax(x)
    x[1], x[3, 2], x[5, 7], x[7, 4] = -torch.inf, torch.nan, torch.inf, -torch.inf
    found = native_rows.softmax(x)
    assert torch.equal(found[::2], plain[::2])
    assert not found[1].any()
    assert found[3].isnan().all() and found[5].isnan().any()
    assert found[7, 4] == 0 and found[7].sum() > 0
    x = randn(4, 33, dtype=torch.bfloat16)
    x[2, 5] = torch.nan
    assert rms_norm(x)[2].isnan().all() and not rms_norm(x)[[0, 1, 3]].isnan().any()


def test_no_rows_and_no_columns():
    assert native_rows.softmax(torch.empty(0, 4)).shape == (0, 4)
    assert torch.equal(native_rows.row_sum(torch.empty(3, 0)), torch.zeros(3, 1))
    assert rms_norm(torch.empty(0, 8)).shape == (0, 8)


def test_ordinary_inference_is_the_deterministic_one():
    """Not training, whose operations are PyTorch's with gradients and without."""
    x, weight, angle = randn(50, 66, dtype=torch.bfloat16), randn(66, seed=1), randn(50, 33)
    logits, how = randn(50, 10), {"eps": 1e-6}
    tables = {**how, "cos": angle.cos(), "sin": angle.sin()}
    calls = {
        "rms_norm": lambda ops: ops.rms_norm(x, weight, **how),
        "norm_and_rope": lambda ops: ops.norm_and_rope(x[None, :, None, None], weight, **tables),
        "softmax": lambda ops: ops.softmax(logits),
        "sigmoid": lambda ops: ops.sigmoid(logits),
        "row_sum": lambda ops: ops.row_sum(logits),
        "unit_rows": lambda ops: ops.unit_rows(logits, eps=1e-6),
        "cos_and_sin": lambda ops: torch.stack(ops.cos_and_sin(logits)),
    }
    for name, call in calls.items():
        assert torch.equal(call(DEFAULT_OPS), call(BATCH_INVARIANT_OPS)), name
    for name in ("rms_norm", "softmax"):
        plain = calls[name](TRAINING_OPS)
        wanting = torch.ones((), requires_grad=True)
        x, logits = x * wanting.to(x.dtype), logits * wanting
        assert torch.equal(calls[name](TRAINING_OPS), plain), name
        x, logits = x.detach(), logits.detach()


def test_a_graph_computes_the_same_bits():
    x = randn(5, 40)
    graph = torch.compile(lambda t: invariant.softmax(t), backend="eager", fullgraph=True)
    assert torch.equal(graph(x), native_rows.softmax(x))
