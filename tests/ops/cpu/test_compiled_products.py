"""The compiled loop for few rows by large weights: any sizes, any mode, and where it is used."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times, sums_of_product

from expertmesh.ops.cpu import compiled_products
from expertmesh.ops.cpu.compiled_loops import DTYPES
from expertmesh.ops.cpu.compiled_products import ROWS, product, rows_at_once

needs_compiler = pytest.mark.usefixtures("cpp_compiler")


def make_call(sizes, dtype, rows=4):
    R, E, N, K, B = sizes
    generator = torch.Generator().manual_seed(0)

    def below(most, *shape):
        return torch.randint(0, most, shape, generator=generator).int()

    x_RK = torch.randn(R, K, generator=generator)
    w_ENK = torch.randn(E, N, K, generator=generator).to(dtype)
    return x_RK, w_ENK, below(E, B), below(R, B, rows)


def factors(call, dtype):
    x_RK, w_ENK, experts_B, rows_B4 = call
    return x_RK[rows_B4.long()].to(dtype), w_ENK[experts_B.long()].to(dtype).mT


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, rows) for rows in ROWS] + [(t, 4) for t in DTYPES[1:]]
)
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
def test_agrees_with_the_oracle_for_all_sizes(sizes, dtype, rows):
    call = make_call(sizes, dtype, rows=rows)
    found = product(*call)
    assert found.dtype == torch.float32
    plain, exact = (torch.matmul(*factors(call, t)) for t in (torch.float32, torch.float64))
    sums = sums_of_product(*factors(call, torch.float32))
    assert_two_times(found, plain, exact, what="product", sums=sums)


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


@pytest.fixture
def _any_size(processor, threshold):
    processor(mkl_holds_back=True)
    threshold(compiled_products, "SMALLEST", 1)


@needs_compiler
@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize(
    ("K", "sizes", "rows"),
    [
        (8, [1, 1], 1),
        (8, [2, 1], 2),
        (8, [3, 1], 4),
        (8, [4, 4], 4),
        (8, [5, 3], 4),
        (8, [8, 8], 4),
        (8, [9, 8], 0),  # five blocks for two experts
        (8, [1], 0),  # one block
        (8, [], 0),
        (2048, [1, 1], 1),
        (2048, [2, 2], 2),
        (2048, [3, 2], 2),
        (2048, [3, 3], 0),  # four blocks of two rows
        (4096, [1, 1], 1),
        (4096, [2, 2], 0),
        (9000, [1, 1], 1),
    ],
)
def test_rows_at_once_fit_the_cache(K, sizes, rows):
    assert rows_at_once(torch.zeros(3, 2, K).bfloat16(), sizes) == rows


@needs_compiler
@pytest.mark.usefixtures("_any_size")
def test_weights_that_it_takes():
    w = torch.randn(4, 6, 8)
    for good in (w, w.bfloat16(), w.half()):
        assert rows_at_once(good, [3, 1]) == 4
    assert not rows_at_once(w.double(), [1, 1])
    assert not rows_at_once(w.mT, [1, 1])
    for dim in range(3):
        assert not rows_at_once(w.narrow(dim, 0, 1).contiguous(), [1, 1])


@needs_compiler
@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize(
    ("dtype", "has_products", "rows"),
    [(torch.float32, True, 0), (torch.bfloat16, True, 2), (torch.bfloat16, False, 4)],
)
def test_where_mkl_has_the_processors_own_code(processor, dtype, has_products, rows):
    processor(mkl_holds_back=False, has_bf16=has_products)
    assert rows_at_once(torch.zeros(3, 2, 8).to(dtype), [3, 1]) == rows


def test_small_weights_need_no_compiler():
    before = compiled_products.loop_for.cache_info()
    assert not rows_at_once(torch.randn(4, 6, 8), [1, 1])
    assert compiled_products.loop_for.cache_info() == before
