"""Rows times their experts' matrices with adapters: against a loop in FP64, by the two-times rule."""

import pytest
import torch

from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.testing import numerics

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
def test_against_a_loop(transposed, dtype, rests):
    x, w, a, b, dy = draw(dtype, transposed=transposed)
    oracle = loop(*(t.double() for t in (x, w, a, b, dy)), transposed=transposed)
    plain = loop(x, w, a, b, dy, transposed=transposed)
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    w.requires_grad_(not rests)
    y = adapted_linear(
        leaves[0], w, offsets(), leaves[1], leaves[2], SCALING, transposed=transposed
    )
    y.backward(dy)
    ours = dict(zip("yxab", (y.detach(), *(t.grad for t in leaves)), strict=True))
    for what in oracle:
        numerics.assert_two_times(ours[what], plain[what], oracle[what], what=what)
    assert not ours["y"][LIVE:].any() and not ours["x"][LIVE:].any()
    assert (w.grad is None) == rests


def test_no_second_derivative():
    x, w, a, b, _ = draw(torch.float64, transposed=False)
    a.requires_grad_()
    y = adapted_linear(x.nan_to_num(), w, offsets(), a, b, SCALING)
    (grad,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
