"""The batch-invariant pieces: right, differentiable, and the same bits at every place of a tensor."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracle.numerics import assert_close_fp64

from expertmesh.kernels.cpu.library import Loaded
from expertmesh.ops.activation import activate, inner_name, num_branches
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 130),
    products=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_a_row_of_a_product_does_not_know_its_place(rows, columns, products, dtype, bias):
    x = torch.randn(rows, products).to(dtype)
    w = torch.randn(columns, products).to(dtype)
    b = torch.randn(columns).to(dtype) if bias else None
    whole = invariant.linear(x, w, b)
    assert torch.equal(invariant.linear(x.flip(0), w, b), whole.flip(0))
    place = rows // 2
    assert torch.equal(invariant.linear(x[place : place + 1], w, b), whole[place : place + 1])


@pytest.fixture
def no_verdicts():
    """Verdicts are kept by rounded shape: other tests' must not reach a patched product, nor its verdicts others."""
    for verdicts in (invariant._rows_of, invariant._batched_rows_of):
        verdicts.cache_clear()
    yield
    for verdicts in (invariant._rows_of, invariant._batched_rows_of):
        verdicts.cache_clear()


@pytest.mark.usefixtures("no_verdicts")
def test_where_places_differ_rows_go_one_by_one(monkeypatch, processor):
    """The trial's verdict is obeyed: with a product that favours odd rows, calls have one row."""
    processor(loaded=Loaded(None))
    x, w = torch.randn(5, 56), torch.randn(24, 56)
    counts = []

    def counting(x, w, b, out):
        counts.append(len(x))
        torch.mm(x, w.T, out=out)
        out[1::2] *= 1 + 1e-6
        return out

    monkeypatch.setattr(invariant, "_product", counting)
    whole = invariant.linear(x, w)
    counts.clear()
    assert torch.equal(invariant.linear(x, w)[3:4], invariant.linear(x[3:4], w))
    assert torch.equal(whole, torch.cat([invariant.linear(row[None], w) for row in x]))
    assert set(counts) == {1}


def tried(product, dtype=torch.float32, columns=48, products=208):
    """The trial's verdict on a product of rows (M, K) and columns (N, K)."""
    draw = invariant._drawing(1, torch.empty(0, dtype=dtype))
    w = invariant._doubled(draw(columns, products), 1)
    return invariant._tried(lambda x: product(x, w), lambda count: draw(count, products))


def test_the_trial_notices_a_place_that_differs():
    def favouring(x, w):
        y = x @ w.T
        y[1::2] *= 1 + 1e-6
        return y

    assert tried(lambda x, w: x @ w.T).most >= 1
    assert tried(favouring) == invariant.ONE_BY_ONE


@pytest.mark.parametrize(
    ("odd", "rows"),
    [
        (lambda count: count < 4, invariant.RowRange(4, 64)),
        (lambda count: count == 15, invariant.RowRange(16, 64)),
        (lambda count: count > 16, invariant.RowRange(1, 16)),
        (lambda count: False, invariant.RowRange(1, 64)),
    ],
)
def test_the_trial_notices_a_number_of_rows_that_differs(odd, rows):
    """As a library does that has other code for few rows."""

    def product(x, w):
        y = torch.cat([(row * w).sum(-1)[None] for row in x])
        return y * (1 + 1e-6) if odd(len(x)) else y

    assert tried(product) == rows


def test_the_trial_notices_another_order_of_sums_behind_the_rounding_to_bf16():
    """Ordinary numbers would show it in one of some 20,000 results."""

    def product(x, w):
        terms = (x[:, None].float() * w.float()).unbind(-1)
        y = torch.zeros(len(x), len(w))
        for term in terms[::-1] if len(x) == 1 else terms:
            y += term
        return y.to(x.dtype)

    assert tried(product, torch.bfloat16, 16, 64) == invariant.RowRange(2, 64)


@pytest.mark.usefixtures("no_verdicts")
def test_where_batches_differ_products_go_one_by_one(monkeypatch):
    def favouring(x, w, bmm=torch.bmm):
        y = bmm(x, w)
        return y * (1 + 1e-6) if len(x) == 64 else y

    x, w = torch.randn(70, 3, 48), torch.randn(70, 48, 80)
    monkeypatch.setattr(torch, "bmm", favouring)
    whole = invariant.batched_product(x, w)
    assert torch.equal(whole[5:9], invariant.batched_product(x[5:9], w[5:9]))
    torch.testing.assert_close(whole, x @ w)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 64, 70, 150])
@pytest.mark.parametrize(
    "rows",
    [
        invariant.RowRange(1, 64),
        invariant.RowRange(4, 16),
        invariant.RowRange(16, 64),
        invariant.ONE_BY_ONE,
    ],
)
def test_calls_have_rows_that_were_tried(rows, num_rows):
    calls = list(rows.calls(num_rows))
    assert [i for part, _ in calls for i in range(num_rows)[part]] == list(range(num_rows))
    for part, count in calls:
        assert part.stop - part.start <= count
        assert count == rows.most or max(rows.least, 1) <= count <= invariant.BLOCK_ROWS


@pytest.mark.parametrize("dtype", WIDE)
def test_a_batched_product_does_not_know_its_batch(dtype):
    x, w = torch.randn(200, 23, 64).to(dtype), torch.randn(200, 64, 32).to(dtype)
    whole = invariant.batched_product(x, w)
    assert_close_fp64(invariant.batched_product(x.double(), w.double()), x.double() @ w.double(), what="product")
    for some, rows in ((slice(3, 4), slice(2, 3)), (slice(0, 33), slice(5, 23))):
        part = invariant.batched_product(x[some, rows].contiguous(), w[some])
        assert torch.equal(part, whole[some, rows])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", ["exp", "erf", "cos", "sin"])
def test_an_element_does_not_know_its_place(name, dtype):
    x = torch.randn(9001).to(dtype) * 3
    whole = invariant.pointwise(x, name)
    for part in (slice(0, 1), slice(3, 5), slice(17, 4200), slice(8999, 9001)):
        assert torch.equal(invariant.pointwise(x[part], name), whole[part])
    assert torch.equal(invariant.pointwise(x[:7].expand(3, 7).t(), name)[:, 1], whole[:7])
    assert invariant.pointwise(x[:0], name).shape == (0,)
    assert_close_fp64(invariant.pointwise(x.double(), name), getattr(torch, name)(x.double()), what=name)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 64, 65, 1000])
@pytest.mark.parametrize("dtype", WIDE)
def test_row_reductions(n, dtype):
    x = torch.randn(23, n).to(dtype)
    for function in (
        invariant.row_sum,
        lambda rows: invariant.rms_norm(rows, torch.ones(n), eps=1e-6),
        lambda rows: invariant.unit_rows(rows, eps=1e-6),
        *([invariant.softmax] if n else []),
    ):
        whole = function(x)
        assert torch.equal(function(x[11:12]), whole[11:12])
        assert torch.equal(function(x.flip(0)), whole.flip(0))
    assert_close_fp64(invariant.row_sum(x.double())[:, 0], x.double().sum(1), what="sum", scale=1.0 + n)


def test_they_are_the_functions_they_stand_for():
    x = torch.randn(6, 10, dtype=torch.float64) * 4
    pairs = {
        "softmax": (invariant.softmax(x), x.softmax(-1)),
        "sigmoid": (invariant.sigmoid(x), x.sigmoid()),
        "unit": (invariant.unit_rows(x, eps=1e-6), F.normalize(x, dim=-1, eps=1e-6)),
        "norm": (
            invariant.rms_norm(x, x[0], eps=1e-3),
            F.rms_norm(x, (10,), x[0], 1e-3),
        ),
    }
    for name in ("swiglu", "geglu", "reglu", "gelu", "relu", "relu2", "silu", "clamped_swiglu"):
        h = x.view(6, num_branches(name), -1)
        pairs[name] = (invariant.activate(h, inner_name(name)), activate(h, name))
    for name, (ours, theirs) in pairs.items():
        assert_close_fp64(ours, theirs, what=name)


def test_extremes():
    x = torch.tensor([[-torch.inf, 0.0, 1e4], [-torch.inf] * 3])
    assert torch.equal(invariant.softmax(x), torch.tensor([[0.0, 0.0, 1.0], [0.0] * 3]))
    ends = torch.tensor([-1e4, 0.0, 1e4, torch.inf], requires_grad=True)
    y = invariant.sigmoid(ends)
    assert y.tolist() == [0.0, 0.5, 1.0, 1.0]
    (slope,) = torch.autograd.grad(y[:3].sum(), ends)
    assert slope[:3].tolist() == [0.0, 0.25, 0.0]
    zero = torch.zeros(1, 3, requires_grad=True)  # a masked token
    pairs = invariant.unit_rows(zero, eps=0.5), F.normalize(zero, dim=-1, eps=0.5)
    ours, theirs = (torch.autograd.grad(y.sum(), zero)[0] for y in pairs)
    assert torch.equal(ours, theirs)


def test_gradients():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(invariant.linear, (x, w, b))
    for name in ("exp", "erf", "cos", "sin"):
        assert torch.autograd.gradcheck(lambda t, name=name: invariant.pointwise(t, name), (x,))
    for function in (invariant.softmax, invariant.sigmoid, invariant.row_sum):
        assert torch.autograd.gradcheck(function, (x,))
    q = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *qkv: BATCH_INVARIANT_OPS.attention(*qkv, Visible(3)), (q, k, v))


def test_attention_is_attention():
    q = torch.randn(2, 4, 70, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 70, 6, dtype=torch.float64).unbind()
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close_fp64(BATCH_INVARIANT_OPS.attention(q, k, v, Visible(70)), theirs, what="causal")
    last = BATCH_INVARIANT_OPS.attention(q[:, :, 60:], k, v, Visible(10))
    assert torch.equal(last, BATCH_INVARIANT_OPS.attention(q, k, v, Visible(70))[:, :, 60:])


@pytest.mark.parametrize("bias", [False, True])
def test_the_operators_obey_torch_library(bias):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    b = torch.randn(5, requires_grad=True) if bias else None
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.expertmesh.invariant_linear.default, (x, w, b, "torch"), test_utils=checks)
    torch.library.opcheck(torch.ops.expertmesh.invariant_pointwise.default, (x, "exp"), test_utils=checks)
    torch.library.opcheck(torch.ops.expertmesh.invariant_row_sum.default, (x,), test_utils=checks)
