"""Running errors: no order of summation exceeds them, a type too narrow does."""

import numpy as np
import pytest
import torch

from tests.oracle.numerics import as_fp64, assert_close_fp64, errors
from tests.oracle.oracle_mlp import FUNCTIONS
from tests.oracle.rounded import Rounded, softmax_backward_of, softmax_of

UNIT = torch.finfo(torch.float32).eps / 2
ROWS, INNER, COLUMNS = 16, 48, 6


def chain(x, w, v, dy):
    """Softmax of silu(x w) v, and the gradient of its argument; in the type of the tensors."""
    s = torch.softmax(torch.nn.functional.silu(x @ w) @ v, -1)
    return s, s * (dy - (s * dy).sum(-1, keepdim=True))


def chain_with_errors(x, w, v, dy):
    a = Rounded.exact(x, UNIT).product("ni,ij->nj", w, INNER).function(FUNCTIONS["silu"][0], size=0.0)
    s = softmax_of(a.product("nj,jc->nc", v, INNER))
    return s, softmax_backward_of(s, Rounded.exact(dy, UNIT))


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_in_fp32_stays_below_its_running_error_and_in_bf16_does_not(seed):
    torch.manual_seed(seed)
    x, w, v = torch.randn(ROWS, INNER), torch.randn(INNER, INNER), torch.randn(INNER, COLUMNS)
    given = x, w / INNER**0.5, v / INNER**0.5, torch.randn(ROWS, COLUMNS)
    exact = chain(*(t.double() for t in given))
    bounds = chain_with_errors(*(as_fp64(t) for t in given))
    for bound, right, ours, narrow in zip(
        bounds, exact, chain(*given), chain(*(t.bfloat16() for t in given)), strict=True
    ):
        assert_close_fp64(bound.value, right, what="value")
        assert (errors(ours, right) <= bound.error).all()
        assert not (errors(narrow, right) <= bound.error).all()


def test_rounding_to_a_type_costs_half_a_unit_in_its_last_place():
    x = torch.randn(1000)
    unit = torch.finfo(torch.bfloat16).eps / 2
    bound = Rounded.exact(as_fp64(x), UNIT).to(unit)
    found = errors(x.bfloat16(), x)
    assert (found <= bound.error).all() and found.max() > unit * float(x.abs().max()) / 4


def test_an_error_across_a_jump_is_the_jump():
    slope = FUNCTIONS["relu"][1]
    near, far = Rounded(np.array([1e-9, 1.0]), np.array([1e-8, 1e-8]), UNIT).function(slope, size=0.0).error
    assert near > 1.0 > 2 * far


def test_arithmetic_is_that_of_the_values():
    a, b = (Rounded(np.array([v]), np.array([e]), 0.0) for v, e in ((2.0, 0.1), (-3.0, 0.01)))
    product = a * b
    assert (a + b).value == [-1.0] and product.value == [-6.0] and (-a).value == [-2.0]
    assert (a + b).error == [0.1 + 0.01] and product.error == [2.0 * 0.01 + 0.1 * 3.0 + 0.1 * 0.01]
    both = Rounded(np.array([2.0, -3.0]), np.array([0.1, 0.01]), 0.0)
    assert both.sum(0).value == -1.0 and both.sum(0).error == 0.1 + 0.01
    assert both[1].value == -3.0
