"""The rule that judges sums: any order of an honest sum passes beside a lucky reference, a fault does not."""

import numpy as np
import pytest
import torch

from tests.oracle.numerics import (
    assert_two_times,
    assert_two_times_rms,
    rounding_bound,
    sums_of_product,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLUMNS = 8, 32


def operands(length, dtype):
    a, b = torch.randn(ROWS, length), torch.randn(length, COLUMNS)
    return a.to(dtype), b.to(dtype)


def one_after_another(a, b, dtype):
    """The least exact order: every product and every sum rounded to `dtype`, from the first to the last."""
    total = torch.zeros(len(a), b.shape[1], dtype=dtype)
    for column, row in zip(a.to(dtype).T, b.to(dtype), strict=True):
        total += column[:, None] * row
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("positive", [False, True])
def test_an_honest_sum_passes_beside_a_lucky_reference(length, dtype, positive):
    a, b = (t.abs() if positive else t for t in operands(length, dtype))
    exact = a.double() @ b.double()
    ours, lucky = one_after_another(a, b, torch.float32).to(dtype), exact.to(dtype)
    assert_two_times(ours, lucky, exact, what="sum", sums=sums_of_product(a, b))
    if length == 1024 and dtype == torch.float32:
        with pytest.raises(AssertionError, match="allowed"):
            assert_two_times(ours, lucky, exact, what="sum")


FAULTS = {
    "one row dropped": lambda a, b: (a[:, 1:], b[1:]),
    "a scale off by 0.5%": lambda a, b: (a * 1.005, b),
    "a wrong weight": lambda a, b: (torch.cat((a[:, 1:2], a[:, 1:]), 1), b),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2, 7, 64, 1024])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_does_not_pass(length, dtype, fault):
    a, b = operands(length, dtype)
    exact = a.double() @ b.double()
    c, d = FAULTS[fault](a.double(), b.double())
    wrong = (c @ d).to(dtype)
    with pytest.raises(AssertionError, match="the bound of its rounding"):
        assert_two_times(wrong, exact.to(dtype), exact, what=fault, sums=sums_of_product(a, b))


def test_sums_in_a_type_too_narrow_do_not_pass():
    a, b = operands(1024, torch.bfloat16)
    exact, narrow = a.double() @ b.double(), one_after_another(a, b, torch.bfloat16)
    with pytest.raises(AssertionError, match="allowed"):
        assert_two_times(narrow, exact.bfloat16(), exact, what="sum", sums=sums_of_product(a, b))


def test_the_bound_is_that_of_the_paper_or_the_certain_one():
    ones = np.ones((1, 100))
    unit = torch.finfo(torch.float32).eps / 2
    for length, factor in ((3, 3.0), (16, 16.0), (100, 40.0)):
        sums = sums_of_product(ones[:, :length], ones[:, :length].T)
        bound = rounding_bound(sums, sums.sizes, torch.float64)
        assert bound == pytest.approx(factor * unit * length)


def test_the_rule_of_root_mean_squares_hears_a_fault_and_no_lottery():
    """Errors of draws are pooled, each beside the size of its own values; one number that is far off does not decide, a
    factor does."""
    exact = [torch.randn(9, 30, dtype=torch.float64) * 10.0**scale for scale in (-3, 0, 3)]
    noise = [torch.randn_like(one) * 1e-5 * one.square().mean().sqrt() for one in exact]
    ours, theirs = ([a + b * f for a, b in zip(exact, noise, strict=True)] for f in (1.9, -1.0))
    ours[0][0, 0] = exact[0][0, 0] + 5 * noise[0][0, 0]
    how = {"what": "draws", "dtype": torch.float32}
    assert_two_times_rms(ours, theirs, exact, **how)
    for fault in (ours[0] * 1.005, ours[0] + 3 * noise[0], ours[0] * torch.nan, ours[0][:8]):
        with pytest.raises(AssertionError, match="draws: root mean square|shapes differ"):
            assert_two_times_rms([fault, *ours[1:]], theirs, exact, **how)
