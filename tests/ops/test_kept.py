"""Weights that are kept for products: the same bits, made again when they change, and nothing kept that may change unseen."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.invariant.kept import Kept, keeping
from expertmesh.ops.onednn import can_pack, pack


class Counted:
    """Makes weights of 100 bytes each and counts them."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, is_kept: bool) -> "Counted":
        self.num_made += 1
        self.is_kept = is_kept
        return self

    num_bytes = 100


def made_by(kept, w, bias=None, part=None):
    """How many of three calls made something."""
    make = Counted()
    for _ in range(3):
        kept.get(w, bias, make, part=part)
    return make.num_made


def test_a_parameter_is_made_once_and_again_after_each_change():
    w, b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))
    kept = Kept([w, b], most_bytes=0)
    assert made_by(kept, w, b) == 1 and made_by(kept, w, b) == 0
    for changed in (w, b):
        with torch.no_grad():
            changed.add_(1)
        assert made_by(kept, w, b) == 1 and made_by(kept, w, b) == 0
    w.data.mul_(2)  # which no version counts
    kept.clear()
    assert made_by(kept, w, b) == 1


def test_other_tensors_are_not_kept():
    w = nn.Parameter(torch.randn(4, 6))
    kept = Kept([w], most_bytes=1000)
    assert made_by(kept, torch.randn(4, 6)) == 3
    assert made_by(kept, w[:2]) == 3  # the same address
    assert made_by(kept, w, torch.randn(4)) == 3
    old = w.data
    w.data = torch.randn(4, 6)
    assert made_by(kept, w) == 3 and made_by(kept, old) == 3
    with torch.inference_mode():
        unversioned = torch.randn(4, 6)
    assert made_by(Kept([unversioned], most_bytes=1000), unversioned) == 3


def test_parts_are_kept_within_their_bytes():
    w = nn.Parameter(torch.randn(5, 4, 6))
    kept = Kept([w], most_bytes=250)
    assert [made_by(kept, w, part=part) for part in range(5)] == [1, 1, 1, 3, 3]
    with torch.no_grad():
        w.add_(1)
    assert [made_by(kept, w, part=part) for part in range(5)] == [1, 1, 1, 3, 3]
    kept.clear()
    assert [made_by(kept, w, part=part) for part in (4, 3, 2, 1)] == [1, 1, 1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("columns", "products"), [(64, 128), (37, 100), (256, 272)])
def test_products_have_the_bits_of_those_that_keep_nothing(columns, products, with_bias, dtype):
    w = nn.Parameter(torch.randn(columns, products).to(dtype))
    b = nn.Parameter(torch.randn(columns).to(dtype)) if with_bias else None
    kept = Kept([p for p in (w, b) if p is not None], most_bytes=0)
    for rows in (1, 2, 3, 16, 40, 64, 130):
        x = torch.randn(rows, products).to(dtype)
        with torch.no_grad():
            expected = invariant.linear(x, w, b)
            for _ in range(2):
                with keeping(kept):
                    assert torch.equal(invariant.linear(x, w, b), expected)
            w.add_(0.5)
            with keeping(kept):
                found = invariant.linear(x, w, b)
            assert torch.equal(found, invariant.linear(x, w, b)) and not torch.equal(
                found, expected
            )


def test_a_packed_weight_gives_the_same_product():
    """Whether or not the trial finds its bits to be the same."""
    types = [t for t in (torch.float32, torch.bfloat16) if can_pack(t)]
    for dtype in types:
        w, b = torch.randn(270, 300).to(dtype), torch.randn(270).to(dtype)
        block = invariant.BlockProduct.of(w, b)
        packed = replace(block, packed=pack(block.w_NK))
        for rows in (1, 5, 64, 70):
            x = torch.randn(rows, 300).to(dtype)
            found = packed.into(x, x.new_empty(rows, 270))
            expected = x.double() @ w.double().T + b.double()
            torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0.1)
            ordered = block.in_order().into(x, x.new_empty(rows, 270))
            assert torch.equal(ordered, block.into(x, x.new_empty(rows, 270)))
