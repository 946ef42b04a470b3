"""The compiled loop for few rows by large weights: any sizes, any mode, and what happens without a compiler."""

from unittest.mock import patch

import pytest
import torch

from expertmesh.ops import compiled_products
from expertmesh.ops.compiled import DTYPES
from expertmesh.ops.compiled_products import loop_for, product, serves
from expertmesh.testing.numerics import assert_two_times

needs_compiler = pytest.mark.usefixtures("_compiler")


@pytest.fixture
def _compiler():
    if "InvalidCxxCompiler" in loop_for(torch.float32).problem:
        pytest.skip("no C++ compiler")


def make_call(sizes, dtype, seed=0):
    R, E, N, K, B = sizes
    generator = torch.Generator().manual_seed(seed)

    def below(most, *shape):
        return torch.randint(0, most, shape, generator=generator).int()

    x_RK = torch.randn(R, K, generator=generator)
    w_ENK = torch.randn(E, N, K, generator=generator).to(dtype)
    return x_RK, w_ENK, below(E, B), below(R, B, compiled_products.ROWS)


def plain(call, dtype):
    x_RK, w_ENK, experts_B, rows_B4 = call
    x_B4K, w_BNK = x_RK[rows_B4.long()].to(dtype), w_ENK[experts_B.long()].to(dtype)
    return torch.einsum("bik,bnk->bin", x_B4K, w_BNK)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, 2, 2, 2),
        (5, 3, 7, 33, 2),
        (9, 9, 9, 9, 9),
        (64, 64, 64, 64, 64),
        (6, 4, 513, 31, 11),
        (256, 16, 64, 1024, 90),
    ],
    ids=str,
)
def test_agrees_with_the_oracle_for_all_sizes(sizes, dtype):
    call = make_call(sizes, dtype)
    found = product(*call)
    assert found.dtype == torch.float32
    exact = plain(call, torch.float64)
    assert_two_times(found, plain(call, torch.float32), exact, what="product", dtype=torch.float32)


@needs_compiler
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("threads", [1, 2])
def test_in_every_mode_and_with_more_threads_than_it_was_made_with(mode, threads):
    call = make_call((6, 4, 40, 64, 8), torch.bfloat16)
    expected, before = product(*call), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with mode():
            x_RK, w_ENK, *maps = call
            found = product(x_RK, torch.nn.Parameter(w_ENK), *maps)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)
    assert not found.requires_grad


@needs_compiler
def test_a_row_has_the_same_sums_in_whatever_block_it_is():
    x_RK, w_ENK, experts_B, rows_B4 = make_call((9, 3, 40, 70, 6), torch.float16)
    experts_B[:], rows_B4[2, 3] = 1, 5
    expected = product(x_RK, w_ENK, experts_B, rows_B4)[2, 3]
    alone = torch.full((2, 4), 5, dtype=torch.int32)
    assert torch.equal(product(x_RK, w_ENK, experts_B[:2], alone)[1, 0], expected)


@needs_compiler
def test_what_it_serves():
    w = torch.randn(4, 6, 8)
    assert not serves(w), "small"
    with patch.object(compiled_products, "SMALLEST", 1):
        assert serves(w, w.bfloat16(), w.half())
        assert not serves(w.double())
        assert not serves(w, w.mT)
        for dim in range(3):
            assert not serves(w.narrow(dim, 0, 1).contiguous())


def test_small_weights_need_no_compiler():
    with patch.object(compiled_products, "loop_for", side_effect=AssertionError):
        assert not serves(torch.randn(4, 6, 8), torch.randn(4, 8, 6))
