"""The ends of the uniform numbers behind all noise."""

import pytest
import torch

from expertmesh.moe.random import gaussian, gumbel, uniform
from expertmesh.testing.oracle_random import uniform as oracle_uniform


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_bits_stay_inside_the_open_interval(dtype):
    bits = torch.tensor([0, 1, 511, 512, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 1])
    u = uniform(bits, dtype)
    assert (u > 0).all() and (u < 1).all()
    assert torch.equal(u.double(), torch.from_numpy(oracle_uniform(bits.numpy().astype("uint64"))))
    assert gumbel(bits, dtype).isfinite().all()
    assert gaussian(bits, bits, dtype).isfinite().all()
