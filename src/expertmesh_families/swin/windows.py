"""Windows of a map of tokens: partition, relative positions, and masks of shifted windows."""

import math

import torch
from torch import Tensor

_APART = -100.0
_COORDINATE_RANGE = 8.0


def into_windows(x_BHWD: Tensor, window: int) -> Tensor:
    """Windows of a map, (B, H, W, D) -> (B * windows, N, D), N = window^2; windows of an image and tokens of a window
    row by row."""
    B, H, W, D = x_BHWD.shape
    x = x_BHWD.view(B, H // window, window, W // window, window, D)
    return x.transpose(2, 3).reshape(-1, window * window, D)


def from_windows(x_MND: Tensor, side: int, window: int) -> Tensor:
    """Inverse of `into_windows` for maps of side x side tokens."""
    per_side, D = side // window, x_MND.shape[-1]
    x = x_MND.view(-1, per_side, per_side, window, window, D)
    return x.transpose(2, 3).reshape(-1, side, side, D)


def log_coordinates(window: int, learned_window: int) -> Tensor:
    """Log-spaced offsets of rows and columns, ((2 w - 1)^2, 2) FP64, from -(w - 1) to w - 1 (Liu et al. 2022, eq. 4).

    sign(d) log2(1 + 8 |d| / (w' - 1)) / log2(8). Offsets are relative to the window with which the bias was learned, so
    that a larger window extrapolates only a little.

    Args:
        learned_window: w', window of learning, whose largest offset is 8 before the logarithm.
    """
    offsets = torch.arange(1 - window, window, dtype=torch.float64, device="cpu")
    offsets = offsets * (_COORDINATE_RANGE / max(learned_window - 1, 1))
    offsets = offsets.sign() * torch.log2(1 + offsets.abs()) / math.log2(_COORDINATE_RANGE)
    return torch.cartesian_prod(offsets, offsets)


def relative_index(window: int) -> Tensor:
    """Row of `log_coordinates` with the offset of each query and key in a window, (N, N) int64."""
    places = torch.arange(window, device="cpu")
    places_N2 = torch.cartesian_prod(places, places)
    offsets_NN2 = places_N2[:, None] - places_N2 + window - 1
    return offsets_NN2[..., 0] * (2 * window - 1) + offsets_NN2[..., 1]


def region_mask(side: int, window: int, shift: int) -> Tensor:
    """Additive attention mask of a map rolled by -shift, (windows, N, N) FP32: -100 between tokens of different
    regions.

    Rolling joins up to three regions along each axis in a window; tokens attend within their region (Liu et al. 2021,
    3.2).
    """
    piece = torch.zeros(side, dtype=torch.int64, device="cpu")
    piece[side - window : side - shift], piece[side - shift :] = 1, 2
    regions_HW = 3 * piece[:, None] + piece
    regions_MN = into_windows(regions_HW[None, :, :, None], window)[..., 0]
    apart = regions_MN[:, :, None] != regions_MN[:, None]
    return apart.to(torch.float32) * _APART
