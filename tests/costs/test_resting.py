"""Memory of weights that rest under adapters: the bytes of the tensors themselves, and the published sizes on one card."""

import math

import pytest
import torch

from expertmesh.ops.experts.weights import FORMATS
from expertmesh.spec.resting import LAYOUTS, Resting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [n for n, one in FORMATS.items() if one.name == n])
@pytest.mark.parametrize("shape", [(5, 2, 192, 384), (3, 130, 256)])
def test_bytes_of_a_format_are_those_of_its_tensors(form, shape, dtype):
    for group in (32, 64, 128):
        kept = FORMATS[form].kept(shape, dtype, group).values()
        expected = sum(math.prod(size) * kind.itemsize for size, kind in kept)
        name = "products" if form == "dense" else form
        assert Resting(name, group).num_bytes(shape, element_bytes=dtype.itemsize) == expected


def test_every_format_has_its_bytes():
    known = {name for name, one in FORMATS.items() if one.name == name}
    assert set(LAYOUTS) == known - {"dense"} | {"products", "float32"}
