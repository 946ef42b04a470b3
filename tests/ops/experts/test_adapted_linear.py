"""Rows times their experts' matrices with adapters: against a loop in FP64, by the two-times rule."""

import pytest
import torch
from tests.oracle import numerics
from torch.profiler import ProfilerActivity, profile

from expertmesh.errors import ConfigError
from expertmesh.ops.cpu import adapted_linear as cpu_loop
from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.ops.experts.grouped_linear import grouped_linear

R, SIZES, N, K, RANK, SCALING = 90, (35, 0, 1, 41), 17, 9, 3, 1.75
LIVE = sum(SIZES)


def offsets():
    return torch.tensor([0, *SIZES], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw(dtype, *, transposed):
    """x, w, a, b and the gradient of y; factors are views, as peft gives them."""
    E = len(SIZES)
    x, dy = torch.randn(R, K), torch.randn(R, N)
    x[LIVE:] = dy[LIVE:] = float("nan")
    w = torch.randn(E, K, N) if transposed else torch.randn(E, N, K)
    a, b = torch.randn(RANK, E, K).transpose(0, 1), torch.randn(N, RANK, E).permute(2, 0, 1)
    return [t.to(dtype) for t in (x, w, a, b, dy)]


def loop(x, w, a, b, dy, *, transposed):
    """The plain way: one product per expert, zeros behind the last row."""
    x, a, b = (t.nan_to_num().detach().requires_grad_() for t in (x, a, b))
    ends = offsets().tolist()
    rows = []
    for e, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        x_e = x[start:stop]
        rows.append(x_e @ (w[e] if transposed else w[e].T) + SCALING * ((x_e @ a[e].T) @ b[e].T))
    y = torch.cat([*rows, x.new_zeros(R - ends[-1], N)])
    y.backward(dy.nan_to_num())
    return {"y": y.detach(), "x": x.grad, "a": a.grad, "b": b.grad}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rests", [True, False], ids=["at rest", "learning"])
@pytest.mark.parametrize("together", [1, 64], ids=["alone", "together"])
def test_against_a_loop(together, transposed, dtype, rests, monkeypatch):
    """With experts that share a product and without, whatever this processor's own choice is."""
    monkeypatch.setitem(cpu_loop.PANEL_ROWS, cpu_loop.instructions_for(dtype), together)
    x, w, a, b, dy = draw(dtype, transposed=transposed)
    oracle = loop(*(t.double() for t in (x, w, a, b, dy)), transposed=transposed)
    plain = loop(x, w, a, b, dy, transposed=transposed)
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    w.requires_grad_(not rests)
    y = adapted_linear(leaves[0], w, offsets(), leaves[1], leaves[2], SCALING, transposed=transposed)
    y.backward(dy)
    ours = dict(zip("yxab", (y.detach(), *(t.grad for t in leaves)), strict=True))
    for what in oracle:
        numerics.assert_two_times(ours[what], plain[what], oracle[what], what=what)
    assert not ours["y"][LIVE:].any() and not ours["x"][LIVE:].any()
    assert (w.grad is None) == rests


def test_rows_that_nobody_asks_for_are_not_multiplied():
    x, w, a, b, dy = draw(torch.float32, transposed=False)
    found = []
    for needs_x in (True, False):
        leaves = [t.nan_to_num().requires_grad_(t is not x or needs_x) for t in (x, a, b)]
        y = adapted_linear(leaves[0], w, offsets(), *leaves[1:], SCALING)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            y.backward(dy)
        products = sum(e.count for e in seen.key_averages() if e.key in ("aten::mm", "aten::addmm"))
        found.append((products, *(t.grad for t in leaves[1:])))
    (many, *grads), (few, *same) = found
    assert few < many and all(map(torch.equal, grads, same)) and leaves[0].grad is None


@pytest.mark.parametrize("K", [32, 9], ids="K={}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adapts", [True, False], ids=["adapted", "plain"])
def test_what_is_not_finite_stays_with_its_expert(adapts, dtype, K):
    """Rows are multiplied in blocks that may reach into the next expert's."""
    counts, r = (69, 3, 2), 2
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x, dy = torch.randn(sum(counts), K).to(dtype), torch.randn(sum(counts), 32).to(dtype)
    w, a, b = (torch.randn(3, *size).to(dtype) for size in ((32, K), (r, K), (32, r)))

    def results(to=dtype):
        leaves = [t.to(to, copy=True).requires_grad_() for t in (x, *((a, b) if adapts else (w,)))]
        if adapts:
            y = adapted_linear(leaves[0], w.to(to), ends, *leaves[1:], SCALING)
        else:
            y = grouped_linear(leaves[0], leaves[1], ends)
        y.backward(dy.to(to))
        rows = y.detach(), leaves[0].grad
        first = [t[:69] for t in rows] + [leaf.grad[:1] for leaf in leaves[1:]]
        last = [t[72:] for t in rows] + [leaf.grad[2:] for leaf in leaves[1:]]
        return [*first, *last]

    plain, exact = results(), results(torch.float64)
    x[69:72], dy[69:72] = float("nan"), float("inf")
    for before, after, oracle in zip(plain, results(), exact, strict=True):
        numerics.assert_two_times(after, before, oracle, what="others")


def test_no_second_derivative():
    x, w, a, b, _ = draw(torch.float64, transposed=False)
    a.requires_grad_()
    y = adapted_linear(x.nan_to_num(), w, offsets(), a, b, SCALING)
    (grad,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("w_learns", [False, True])
def test_wrong_shapes_are_named(w_learns):
    x, w, a, b, _ = draw(torch.float32, transposed=False)
    w.requires_grad_(w_learns)
    for call, words in (
        ((x, w, offsets()[1:], a, b), "offsets has shape"),
        ((x, w, torch.cat([offsets(), offsets()[-1:]]), a, b), "offsets has shape"),
        ((x, w, offsets(), a[:, :, 1:], b), f"rows of {K} and w takes {K - 1}"),
        ((x, w, offsets(), a[1:], b), "offsets has shape"),
        ((x, w, offsets(), a, b[..., 1:]), f"b has shape|rows of {RANK}"),
    ):
        with pytest.raises(ConfigError, match=words):
            adapted_linear(*call, SCALING)
    if not w_learns:
        with pytest.raises(ConfigError, match=r"b has shape \(4, 16, 3\).*\(4, 17, 3\)"):
            adapted_linear(x, w, offsets(), a, b[:, 1:], SCALING)
