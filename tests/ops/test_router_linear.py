"""The router's product by BF16 parts: as exact as the FP32 product, forward and backward, and the same experts."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times, two_times_bound
from tests.support.calls import calls_of

from expertmesh.ops import router_linear as ops
from expertmesh.ops.router_linear import FEWEST_SPLIT_ROWS, router_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(T, D, E, *, skew=False):
    torch.manual_seed(T + D + E)
    x = torch.randn(T, D).bfloat16()
    w = torch.randn(E, D) / D**0.5
    if skew:  # sums whose terms nearly cancel, and weights of very different size
        x[:, 1::2] = x[:, ::2][:, : x[:, 1::2].shape[1]]
        w[:, 1::2] = -w[:, ::2][:, : w[:, 1::2].shape[1]] * (1 + 2.0**-10)
        w *= 2.0 ** torch.randint(-12, 12, (E, 1))
    return x.to(DEVICE), w.to(DEVICE)


@pytest.fixture(params=[(256, 192, 8), (300, 71, 7), (257, 130, 1)], ids=str)
def case(request):
    return tokens(*request.param)


def test_product_and_gradients_are_as_exact_as_in_fp32(case):
    x, w = (t.requires_grad_() for t in case)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        logits = router_linear(x, w, backend="triton")
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), w.data_ptr()}
    assert logits.dtype == torch.float32
    grad = torch.randn_like(logits)
    with torch.autocast(DEVICE, torch.bfloat16):
        logits.backward(grad)
    x32, w32 = x.detach().float(), w.detach()
    x64, w64, grad64 = x32.double(), w32.double(), grad.double()
    assert_two_times(logits.detach(), x32 @ w32.t(), x64 @ w64.t(), what="logits")
    assert_two_times(w.grad, grad.t() @ x32, grad64.t() @ x64, what="dw")
    assert_two_times(x.grad, (grad @ w32).bfloat16(), grad64 @ w64, what="dx")


@pytest.mark.parametrize("skew", [False, True])
def test_experts_are_those_of_fp64_wherever_the_gap_is_no_matter_of_rounding(skew):
    x, w = tokens(512, 256, 16, skew=skew)
    logits = router_linear(x, w, backend="triton")
    oracle = x.double() @ w.double().t()
    bound = two_times_bound(x.float() @ w.t(), oracle)
    first, second = oracle.topk(2, dim=1).values.unbind(1)
    clear = first - second > 2 * bound
    assert clear.sum() > len(x) / 2
    assert torch.equal(logits.argmax(1)[clear], oracle.argmax(1)[clear])


def test_three_parts_hold_every_bit_of_a_weight():
    from expertmesh.kernels.split_product import split

    w = torch.randn(33, 65, device=DEVICE) * 2.0 ** torch.randint(-40, 40, (33, 1), device=DEVICE)
    assert torch.equal(split(w, 3).double().sum(0), w.double())
    assert not torch.equal(split(w, 2).double().sum(0), w.double())


def test_parts_that_lie_far_apart(tmp_path):
    """The third part of what has 2**30 elements begins behind 2**31: that many tokens times experts."""
    from expertmesh.kernels import split_product

    rows, width, apart = 64, 16, 2**30
    file, size = (
        str(tmp_path / "sparse"),
        2 * apart + rows * width,
    )  # takes the pages that are written
    memory = torch.from_file(file, shared=True, size=size, dtype=torch.bfloat16)
    grad = torch.randn(rows, width)
    constants = {"PARTS": 3, "BLOCK": rows * width}
    split_product.launch(split_product._split, (1,), grad, memory, grad.numel(), apart, **constants)
    far = memory.as_strided((3, rows, width), (apart, width, 1))
    near = split_product.split(grad, 3)
    assert torch.equal(far, near)
    x = torch.randn(rows, 8).bfloat16()[None]
    options = {"dtype": torch.float32, "long_sum": True}
    products = [split_product._product(p.transpose(1, 2), x, **options) for p in (far, near)]
    assert torch.equal(*products)


def test_long_sums_are_shared_out_and_added_in_order():
    from expertmesh.kernels import split_product

    x, _ = tokens(1000, 40, 5)
    grad = torch.randn(1000, 5, device=DEVICE)
    w = torch.empty(5, 40, device=DEVICE)
    with calls_of(split_product.launch) as launches:
        dx, dw = split_product.gradients(grad, x, w, need_x=False, need_w=True)
    _, again = split_product.gradients(grad, x, w, need_x=False, need_w=True)
    assert launches[1][0]["grid"][2] > 1
    assert dx.numel() == 0
    assert torch.equal(dw, again)
    assert_two_times(dw, grad.t() @ x.float(), grad.double().t() @ x.double(), what="dw")


def test_differentiable_twice():
    x, w = (t.requires_grad_() for t in tokens(256, 64, 4))
    logits = router_linear(x, w, backend="triton")
    weight = torch.randn_like(logits).requires_grad_()
    dx, dw = torch.autograd.grad(logits, (x, w), weight, create_graph=True)
    second = torch.autograd.grad(dx.float().square().sum() + dw.square().sum(), (x, w, weight))
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    x32, w32 = x.detach().float().requires_grad_(), w.detach().requires_grad_()
    references = []
    for a, b in ((x64, w64), (x32, w32)):
        by = weight.detach().to(a.dtype).requires_grad_()
        da, db = torch.autograd.grad(a @ b.t(), (a, b), by, create_graph=True)
        if a is x32:
            da = da.bfloat16().float()
        references.append(torch.autograd.grad(da.square().sum() + db.square().sum(), (a, b, by)))
    for ours, oracle, same, what in zip(second, *references, ("dx", "dw", "dgrad"), strict=True):
        assert_two_times(ours, same.to(ours.dtype), oracle, what=what, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "dtype", "backend"),
    [
        (FEWEST_SPLIT_ROWS - 1, torch.bfloat16, "triton"),
        (FEWEST_SPLIT_ROWS, torch.float16, "triton"),
        (FEWEST_SPLIT_ROWS, torch.float32, "triton"),
        (FEWEST_SPLIT_ROWS, torch.float64, "triton"),
        (FEWEST_SPLIT_ROWS, torch.bfloat16, "torch"),
    ],
)
def test_what_is_not_for_tensor_cores_is_the_product_it_was(rows, dtype, backend):
    x, w = torch.randn(rows, 32, device=DEVICE).to(dtype), torch.randn(4, 32, device=DEVICE)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    expected = x.to(exact) @ w.to(exact).t()
    assert torch.equal(router_linear(x, w, backend=backend), expected)


def test_operators_pass_opcheck():
    x, w = (t.requires_grad_() for t in tokens(256, 32, 4))
    grad = torch.randn(256, 4, device=DEVICE, requires_grad=True)
    for operator, args in (
        (ops._split_linear, (x, w)),
        (ops._split_gradients, (grad, x, w, True, True)),
    ):
        torch.library.opcheck(operator, args)
