"""MXFP4: 4-bit floating-point numbers (E2M1), 32 of which share a power of two (OCP Microscaling Formats, 5.3.3 and
5.4).

Two numbers are in a byte, the first in the low half; a scale is a byte, the exponent plus 127.
"""

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that share a scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the E2M1 codes 0 to 7; codes 8 to 15 are their negatives."""
_ENDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Numbers in the middle between two values, which are rounded to the one with an even code."""


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Widen values in MXFP4 to BF16, exactly; bitwise equal to transformers'.

    Args:
        blocks: (..., groups, 16) uint8, the lower four bits of each byte first.
        scales: (..., groups) uint8.

    Returns:
        (..., groups * 32) BF16.
    """
    values = [*_VALUES, *(-value for value in _VALUES)]
    table = torch.tensor(values, dtype=torch.bfloat16, device=blocks.device)
    found = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16, device=blocks.device)
    for half, nibbles in enumerate((blocks & 15, blocks >> 4)):
        found[..., half] = table[nibbles.int()]
    found = found.flatten(-2)
    exponents = scales[..., None].int() - 127
    torch.ldexp(found, exponents, out=found)
    return found.flatten(-2)


def packed(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round matrices (..., N, K) to blocks (..., N, K / 2) and scales (..., N, K / 32), of least squared error among
    two scales.

    The smaller scale clips what is above 6 of its units. Numbers that are in MXFP4 already keep their values.
    """
    parts = w.float().unflatten(-1, (-1, BLOCK))
    fitting = parts.abs().amax(-1, keepdim=True).log2().floor().sub_(2)
    ends = torch.tensor(_ENDS, device=w.device)
    ends[1::2] = ends[1::2].nextafter(torch.zeros((), device=w.device))  # these go up
    table = torch.tensor(_VALUES, device=w.device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for more in (0, 1):
        exponent = (fitting + more).clamp_(-127, 127)
        scaled = torch.ldexp(parts, -exponent)
        codes = torch.bucketize(scaled.abs(), ends)
        error = (table[codes] - scaled.abs()).square_().sum(-1, keepdim=True).mul_(4.0**more)
        found.append((error, exponent, codes + 8 * (parts < 0)))
    (error, exponent, codes), (other_error, other_exponent, other_codes) = found
    is_better = other_error < error
    codes = torch.where(is_better, other_codes, codes).to(torch.uint8).flatten(-2)
    exponent = torch.where(is_better, other_exponent, exponent).squeeze(-1)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)
