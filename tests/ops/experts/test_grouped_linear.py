"""Rows times their experts' matrices: against a loop in FP64, by the two-times rule."""

import pytest
import torch
from tests.oracle import numerics
from tests.support.launches import as_on, recorded_launches
from triton.tools.tensor_descriptor import TensorDescriptor

from expertmesh.errors import ConfigError
from expertmesh.functional import grouped_linear
from expertmesh.kernels import moe_forward, moe_wgrad, route_metadata
from expertmesh.ops import triton_linear

R, SIZES = 23, (5, 0, 1, 11)


def draw(dtype, N, K, *, transposed, bias):
    E = len(SIZES)
    x = torch.randn(R, K)
    w = torch.randn(E, K, N) if transposed else torch.randn(E, N, K)
    b, dy = torch.randn(E, N) if bias else None, torch.randn(R, N)
    return [None if t is None else t.to(dtype) for t in (x, w, b, dy)]


def offsets():
    return torch.tensor([0, *SIZES], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def loop(x, w, b, dy, *, transposed):
    """The plain way: one product per expert, zeros behind the last row."""
    x, w, b = (None if t is None else t.detach().requires_grad_() for t in (x, w, b))
    ends = offsets().tolist()
    rows = []
    for e, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        y = x[start:stop] @ (w[e] if transposed else w[e].T)
        rows.append(y if b is None else y + b[e])
    y = torch.cat([*rows, x.new_zeros(R - ends[-1], dy.shape[1])])
    y.backward(dy)
    return {"y": y.detach()} | grads(x, w, b)


def grads(x, w, b):
    return {"x": x.grad, "w": w.grad} | ({} if b is None else {"b": b.grad})


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("transposed", "bias"), [(False, False), (True, True), (False, True)])
def test_against_a_loop(backend, dtype, transposed, bias):
    if backend == "triton" and dtype == torch.float64:
        backend = "auto"
    x, w, b, dy = draw(dtype, 17, 9, transposed=transposed, bias=bias)
    x[sum(SIZES) :] = float("nan")
    dy[sum(SIZES) :] = float("nan")
    clean_x, clean_dy = x.nan_to_num(), dy.nan_to_num()
    oracle = loop(
        *(None if t is None else t.double() for t in (clean_x, w, b, clean_dy)),
        transposed=transposed,
    )
    plain = loop(clean_x, w, b, clean_dy, transposed=transposed)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, w, b)]
    y = grouped_linear(leaves[0], leaves[1], offsets(), b_EN=leaves[2], transposed=transposed, backend=backend)
    y.backward(dy)
    ours = {"y": y.detach()} | grads(*leaves)
    for what in oracle:
        numerics.assert_two_times(ours[what], plain[what], oracle[what], what=what)
    assert not ours["y"][sum(SIZES) :].any() and not ours["x"][sum(SIZES) :].any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_infinity_stays_with_its_expert(dtype, transposed):
    """Whatever rows a product is padded with: 130 and 140 are no multiples of anything."""
    x, w = torch.randn(400, 48), torch.randn(3, 48, 16) if transposed else torch.randn(3, 16, 48)
    x[131, 3] = float("inf")
    x, w = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
    ends = torch.tensor([0, 130, 270, 400], dtype=torch.int32)
    grouped_linear(x, w, ends, transposed=transposed, backend="torch").backward(torch.ones(400, 16, dtype=dtype))
    finite = w.grad.flatten(1).isfinite().all(1)
    assert finite.tolist() == [True, False, True]


def test_without_autograd_the_bits_are_the_same():
    for dtype in (torch.float32, torch.bfloat16):
        x, w, _, _ = draw(dtype, 16, 8, transposed=False, bias=False)
        with torch.no_grad():
            plain = grouped_linear(x, w, offsets())
        assert torch.equal(grouped_linear(x, w.requires_grad_(), offsets()), plain)


@pytest.mark.parametrize("offset", [0, 1])
def test_rows_at_odd_places_take_the_path_with_pointers(offset):
    """On Hopper descriptors read rows that begin at 16 bytes; a view of somebody's buffer need not."""

    def rows(width):
        flat = torch.empty(R * width + offset, dtype=torch.bfloat16, device="meta")
        return flat[offset:].view(R, width)

    x, grad, ends = rows(16), rows(32), torch.empty(4, dtype=torch.int32, device="meta")
    w = torch.empty(3, 32, 16, dtype=torch.bfloat16, device="meta")
    with as_on("sm_90"), recorded_launches(moe_forward, moe_wgrad, route_metadata) as launches:
        triton_linear.forward(x, w, ends, None, transposed=False)
        triton_linear.weight_grad(grad, x, w, ends, transposed=False)
    products = [one for one in launches if one.name in ("rows", "rows_transposed")]
    assert len(products) == 2
    for one in products:
        described = any(isinstance(v, TensorDescriptor) for v in one.values.values())
        assert described == (not offset)


def test_wrong_shapes_are_named():
    x, w, _, _ = draw(torch.float32, 16, 8, transposed=False, bias=False)
    with pytest.raises(ConfigError, match="rows of 8 and w takes 16.*transposed=True"):
        grouped_linear(x, w, offsets(), transposed=True)
    with pytest.raises(ConfigError, match=r"offsets has shape \(4,\)"):
        grouped_linear(x, w, offsets()[1:])
    with pytest.raises(ConfigError, match="w has dtype torch.float64"):
        grouped_linear(x, w.double(), offsets())
    with pytest.raises(ConfigError, match=r"offsets has dtype torch.int64; it must be torch.int32; convert it$"):
        grouped_linear(x, w, offsets().long())


@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain", "autograd"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([0, 2, 4, 9], "offsets hold 9; .* rise to at most the 6 rows"),
        ([0, 2, 1, 6], "offsets hold 1 behind 2"),
        ([0, -2, 4, 6], "offsets hold -2 behind 0"),
        ([1, 2, 4, 6], "offsets hold 1; they must be 0"),
    ],
    ids=str,
)
def test_offsets_that_are_none_are_refused(wrong, words, needs_grad):
    """They gave fewer rows than x has, or products of other experts."""
    x, w = torch.randn(6, 8), torch.randn(3, 5, 8, requires_grad=needs_grad)
    ends = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(ConfigError, match=words) as caught:
        grouped_linear(x, w, ends, backend="torch")
    assert "\n" not in str(caught.value)
