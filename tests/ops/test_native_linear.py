"""Dense products by the kernels in C: with every instruction set, the same bits in every batch, and chosen where they
are faster."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_two_times
from tests.support.poison import poisoned_empty

from expertmesh.ops import native_linear
from expertmesh.ops.op_set import BATCH_INVARIANT_OPS, DEFAULT_OPS

pytestmark = pytest.mark.usefixtures("instructions")
TYPES = (torch.bfloat16, torch.float32)


def make(dtype, rows, columns, products, *, bias=True):
    generator = torch.Generator().manual_seed(rows + columns)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return randn(rows, products), randn(columns, products), randn(columns) if bias else None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 33, 47), (17, 130, 97), (70, 64, 512), (0, 3, 4)])
def test_agrees_with_pytorch(dtype, bias, shape):
    x, w, b = make(dtype, *shape, bias=bias)
    with poisoned_empty():
        found = native_linear.linear(x, w, b)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    assert_two_times(found, F.linear(x, w, b), exact, what="y", dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("columns", "products"), [(33, 47), (96, 256)])
def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(dtype, columns, products):
    x, w, b = make(dtype, 700, columns, products)
    whole = native_linear.linear(x, w, b)
    for at, size in enumerate((1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 100, 256, 511)):
        for first in (7 * at, 700 - size):
            rows = slice(first, first + size)
            assert torch.equal(native_linear.linear(x[rows], w, b), whole[rows]), (first, size)
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        assert torch.equal(native_linear.linear(x, w, b), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_that_is_not_finite_stays_alone(dtype):
    x, w, b = make(dtype, 40, 50, 70)
    plain, others = native_linear.linear(x, w, b), torch.arange(40) != 7
    x[7] = torch.nan
    found = native_linear.linear(x, w, b)
    assert found[7].isnan().all() and torch.equal(found[others], plain[others])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [1, 64, 200])
def test_ordinary_products_are_the_deterministic_ones(instructions, dtype, num_rows):
    """In BF16, by the processor's own instructions, without gradients."""
    x, w, b = make(dtype, num_rows, 96, 256)
    is_taken = dtype == torch.bfloat16 and instructions.has_bf16
    assert native_linear.is_only_way(x, w, b) == is_taken
    y = DEFAULT_OPS.linear(x.view(1, num_rows, 256), w, b)
    if is_taken:
        assert torch.equal(y[0], BATCH_INVARIANT_OPS.linear(x, w, b))
    else:
        assert torch.equal(y[0], F.linear(x, w, b))
    w.requires_grad_()
    wanted = torch.autograd.grad(F.linear(x, w, b).sum(), w)
    assert torch.equal(torch.autograd.grad(DEFAULT_OPS.linear(x, w, b).sum(), w)[0], wanted[0])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_products_of_all_heads_are_those_of_each(dtype):
    x, w, _ = make(dtype, 40, 5 * 24, 32)
    x_THn, w_Hmn = x.view(8, 5, 32)[..., 4:27], w.view(5, 24, 32)[..., 4:27]
    found = native_linear.head_linear(x_THn, w_Hmn)
    for head in range(5):
        own = native_linear.linear(x_THn[:, head], w_Hmn[head], None)
        assert torch.equal(found[:, head], own)
    turned = w_Hmn.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(BATCH_INVARIANT_OPS.head_linear(x_THn, turned), found)
