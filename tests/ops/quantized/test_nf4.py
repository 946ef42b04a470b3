"""NF4: codes and scales of bitsandbytes to the bit, and those that its definition gives."""

import numpy as np
import pytest
import torch

from expertmesh.ops.quantized import nf4

GROUP = 64


def numbers(count):
    """Rows of normal numbers, of levels times a power of two, halfway between levels, of few values, and of zeros."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor(nf4.LEVELS)
    between = (levels[1:] + levels[:-1]) / 2
    rows = count // 5 // GROUP
    kinds = [
        torch.randn(rows, GROUP, generator=generator),
        levels[torch.randint(16, (rows, GROUP), generator=generator)] * 0.25,
        between[torch.randint(15, (rows, GROUP), generator=generator)] * 3,
        torch.randint(-3, 4, (rows, GROUP), generator=generator).float(),
        torch.zeros(rows, GROUP),
    ]
    kinds[2][:, 0] = 3.0  # scales that keep halfway numbers halfway
    return torch.cat(kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_have_the_bits_of_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = numbers(100_000).to(dtype)
    found, state = functional.quantize_4bit(w.flatten(), blocksize=GROUP, quant_type="nf4")
    codes, scales = nf4.packed(w, GROUP)
    assert torch.equal(scales.flatten(), state.absmax)
    assert torch.equal(codes, found.view(len(w), -1))
    theirs = functional.dequantize_4bit(found, state).view(w.shape)
    assert torch.equal(nf4.widened(codes, scales).to(dtype), theirs)


def test_codes_are_those_of_the_nearest_levels():
    w = numbers(20_000)
    codes, scales = nf4.packed(w, GROUP)
    largest = np.abs(w.numpy()).max(1, keepdims=True)
    assert np.array_equal(scales.numpy(), largest)
    shares = np.divide(w.double().numpy(), largest, where=largest > 0, out=np.zeros(w.shape))
    distances = np.abs(shares[..., None] - np.array(nf4.LEVELS))
    pair = np.stack((codes.numpy() >> 4, codes.numpy() & 15), -1).reshape(w.shape)
    chosen = np.take_along_axis(distances, pair[..., None].astype(int), -1)[..., 0]
    assert (chosen - distances.min(-1)).max() < 2**-23  # of FP32
    assert (pair[largest[:, 0] == 0] == 7).all() and not scales[largest[:, 0] == 0].any()
    assert not nf4.widened(codes, scales)[-1].any()


def test_levels_keep_their_values_and_subnormal_numbers_stay_finite():
    w = torch.tensor(nf4.LEVELS).repeat(4)[None] * 0.125
    assert torch.equal(nf4.widened(*nf4.packed(w, GROUP)), w)
    assert nf4.widened(*nf4.packed(torch.full((1, GROUP), 1e-40), GROUP)).isfinite().all()
