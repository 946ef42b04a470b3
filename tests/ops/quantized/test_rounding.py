"""Rounding to 8 and 4 bits: bounded, better than the plain way, and packed so that it comes back."""

import pytest
import torch

from expertmesh.ops.quantized.pack import (
    bytes_of_words,
    from_nibbles,
    int8_of_bytes,
    to_words,
)
from expertmesh.ops.quantized.rounding import BLOCK, rounded, widened

SHAPES = {"int8": (33, 70), "int4": (17, 192), "fp8": (130, 300)}


def matrix(name, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*SHAPES[name], generator=generator, dtype=torch.float64)
    w[3] = 0
    w[5, 7] = 40.0  # an outlier
    return w


def largest(w, name):
    """The largest number that shares a scale with each number."""
    if name == "int8":
        return w.abs().amax(1, keepdim=True).expand_as(w)
    if name == "int4":
        return w.abs().unflatten(1, (-1, 64)).amax(2).repeat_interleave(64, 1)
    out = torch.empty_like(w)
    for i in range(0, w.shape[0], BLOCK):
        for j in range(0, w.shape[1], BLOCK):
            part = w[i : i + BLOCK, j : j + BLOCK]
            out[i : i + BLOCK, j : j + BLOCK] = part.abs().max()
    return out


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_no_number_is_further_off_than_a_plain_step(name, scale_dtype):
    w = matrix(name)
    wide = widened(rounded(w, name, group_size=64, scale_dtype=scale_dtype))
    assert wide.dtype == scale_dtype and wide.shape == w.shape
    off = (wide.double() - w).abs()
    unit = torch.finfo(scale_dtype).eps
    if name == "fp8":  # half a unit of three bits, or of the smallest numbers, for the scales that are tried
        bound = w.abs() * 2**-4 + largest(w, name) * 2 / 448 * 2**-10
    else:  # what is cut off is at most the part that no scale leaves out
        step = largest(w, name) / (127 if name == "int8" else 7)
        bound = largest(w, name) * (0.09 if name == "int8" else 0.45) + step
    assert (off <= bound + w.abs() * 2 * unit).all()
    assert (wide[3] == 0).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_squared_error_is_less_than_by_the_largest_number(name):
    w = matrix(name)
    w[5, 7] = 4.0
    most = 127 if name == "int8" else 7
    step = largest(w, name).clamp_min(1e-9) / most
    plain = (w / step).round() * step
    ours = widened(rounded(w, name, group_size=64, scale_dtype=torch.float32), torch.float64)
    share = (ours - w).square().sum() / (plain - w).square().sum()
    assert share < (1.0 if name == "int8" else 0.9)


def test_important_columns_lose_less():
    w = matrix("int4")
    importance = torch.ones(192)
    importance[::7] = 100.0
    found = {}
    for counts in (None, importance):
        r = rounded(w, "int4", group_size=64, scale_dtype=torch.float32, importance=counts)
        found[counts is None] = (widened(r).double() - w)[:, ::7].square().sum()
    assert found[False] < 0.8 * found[True]


@pytest.mark.parametrize(("bits", "columns"), [(8, 64), (8, 33), (4, 64), (4, 30)])
def test_words_come_back(bits, columns):
    most = 2 ** (bits - 1)
    q = torch.randint(-most, most, (5, columns), dtype=torch.int8)
    data = bytes_of_words(to_words(q, bits))
    back = int8_of_bytes(data) if bits == 8 else from_nibbles(data)
    assert torch.equal(back[:, :columns], q)


def test_columns_make_up_for_those_before_them():
    w = matrix("int4")
    w[5, 7] = 4.0
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(192, 192, generator=generator, dtype=torch.float64)
    x = torch.randn(500, 192, generator=generator, dtype=torch.float64) @ mixed
    found = []
    for importance in (None, x.square().mean(0), x.T @ x / len(x)):
        r = rounded(w, "int4", group_size=64, scale_dtype=torch.float32, importance=importance)
        found.append((x @ (widened(r, torch.float64) - w).T).square().mean())
        assert r.values.min() >= -8 and r.values.max() <= 7
    plain, _, made_up = found
    assert made_up < 0.7 * plain
