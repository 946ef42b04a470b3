"""NF4: 16 levels that are quantiles of a normal distribution, times the largest number of a group (Dettmers et al.
2023, QLoRA, arXiv 2305.14314, appendix E).

Two codes are in a byte, the first in the high half, as bitsandbytes packs them; a scale is the group's largest
magnitude.
"""

import torch
from torch import Tensor

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the codes 0 to 15."""
_SMALLEST = 1e-38
"""Smallest scale whose inverse numbers are multiplied by."""


def packed(w: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round matrices (..., N, K) to codes (..., N, K / 2) uint8 and FP32 scales (..., N, K / group_size).

    A number gets the code of the nearest level, halfway of the lower one; a group of zeros has scale 0 and code 7.
    """
    groups = w.float().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True)
    levels = torch.tensor(LEVELS, device=w.device)
    shares = groups * scales.clamp(min=_SMALLEST).reciprocal()
    codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(-2)
    return codes[..., ::2] << 4 | codes[..., 1::2], scales.squeeze(-1)


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """Widen the codes of `packed` to FP32 (..., N, K)."""
    levels = torch.tensor(LEVELS, device=codes.device)
    both = torch.stack((codes >> 4, codes & 15), -1).flatten(-2)
    groups = levels[both.int()].unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales[..., None]).flatten(-2)
