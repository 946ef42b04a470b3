"""Rows in 8 bits for dispatch between ranks: one FP32 scale per 128 elements, packed into one uint8 tensor.

The layout of a row is DeepSeek-V3's dispatch layout (2024, 3.2.2 and 3.3): its elements as int8 or e4m3, then the FP32
scales.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from expertmesh.config.dispatch_options import DispatchDtype

BLOCK = 128
"""Elements that share a scale."""
_LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}
_TYPES = {"int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn}


def row_bytes(dim: int, element_bytes: int, payload: DispatchDtype) -> int:
    """Bytes of one row of `dim` elements as it is sent."""
    return dim * element_bytes if payload == "same" else dim + 4 * _num_blocks(dim)


def packed(x_RD: Tensor, payload: DispatchDtype) -> Tensor:
    """Round rows to 8 bits.

    Each block is scaled so that its largest element becomes the type's largest number. A block with an infinity or NaN
    becomes NaN. A block whose scale would be below the smallest normal FP32 number becomes 0.

    Args:
        x_RD: (R, D) of a floating-point type.
        payload: "int8" or "float8_e4m3".

    Returns:
        (R, D + 4 ceil(D / 128)) uint8.
    """
    R, D = x_RD.shape
    blocks = _num_blocks(D)
    x_RB = pad(x_RD.to(torch.float32), (0, blocks * BLOCK - D)).view(R, blocks, BLOCK)
    scale_RB = x_RB.abs().amax(-1) / _LARGEST[payload]
    scale_RB = torch.where(scale_RB < torch.finfo(torch.float32).tiny, 1.0, scale_RB)
    x_RD = (x_RB / scale_RB[..., None]).view(R, blocks * BLOCK)[:, :D]
    if payload == "int8":
        x_RD = x_RD.nan_to_num(0.0).round()  # the block's scale is not finite
    rows = x_RD.to(_TYPES[payload]).contiguous().view(torch.uint8)
    return torch.cat((rows, _dense(scale_RB).view(torch.uint8)), 1)


def unpacked(rows: Tensor, dim: int, dtype: torch.dtype, payload: DispatchDtype) -> Tensor:
    """Convert the rows of `packed` back to a floating-point type, (R, D)."""
    R, blocks = rows.shape[0], _num_blocks(dim)
    values_RD = rows[:, :dim].contiguous().view(_TYPES[payload]).to(torch.float32)
    scale_RB = _dense(rows[:, dim:]).view(torch.float32)
    x_RB = pad(values_RD, (0, blocks * BLOCK - dim)).view(R, blocks, BLOCK) * scale_RB[..., None]
    return x_RB.view(R, blocks * BLOCK)[:, :dim].to(dtype)


def _dense(x: Tensor) -> Tensor:
    """Copy that starts at the first byte of its own storage; a tensor of 0 or 1 rows is contiguous at any offset."""
    return x.clone(memory_format=torch.contiguous_format)


def _num_blocks(dim: int) -> int:
    return -(-dim // BLOCK)
