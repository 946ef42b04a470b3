"""Packed layouts of quantised numbers: of compressed-tensors files, and of the CPU's products."""

import sys
from functools import cache

import torch
from torch import Tensor

_CPU_ROWS = 64
"""Rows per block of the CPU's int4 product."""


def nibbles(values: Tensor) -> Tensor:
    """Pack (..., K) numbers in [-8, 7] two to a byte, (..., K / 2) uint8: offset by 8, the first number in the low half."""
    offset = (values.to(torch.int16) + 8).to(torch.uint8)
    return offset[..., ::2] | offset[..., 1::2] << 4


def from_nibbles(packed: Tensor) -> Tensor:
    """Unpack the bytes of `nibbles`: (..., K) int8."""
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return both.to(torch.int8) - 8


def to_words(values: Tensor, bits: int) -> Tensor:
    """Pack (N, K) numbers into (N, K * bits / 32) int32 words, rounded up: offset binary, the first number in the low bits.

    Args:
        values: int8 numbers of 8 or 4 bits.
        bits: 8 or 4.
    """
    per_word = 32 // bits
    short = -values.shape[-1] % per_word
    if bits == 8:
        data = torch.nn.functional.pad(_flipped(values), (0, short))
    else:
        # padding is zero bits, not the number zero
        padded = torch.nn.functional.pad(values, (0, short), value=-8)
        data = nibbles(padded)
    return _swapped(data.contiguous()).view(torch.int32)


def bytes_of_words(words: Tensor) -> Tensor:
    """View (N, W) int32 words as (N, 4 W) uint8 in the order of the numbers."""
    return _swapped(words.contiguous().view(torch.uint8))


def int8_of_bytes(data: Tensor) -> Tensor:
    """Convert offset-binary bytes to int8."""
    return (data ^ 128).view(torch.int8)


def _flipped(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8) ^ 128


def _swapped(data: Tensor) -> Tensor:
    """Reverse the bytes of each word on a big-endian machine; files are little-endian."""
    if sys.byteorder == "little":
        return data
    return data.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)


def for_cpu(packed: Tensor) -> Tensor:
    """Reorder (N, K / 2) nibbles for `_weight_int4pack_mm_for_cpu`, (N, K / 2): columns of blocks of 64 rows.

    Args:
        packed: result of `nibbles`; N must be a multiple of 64.
    """
    N, half = packed.shape
    q = (from_nibbles(packed) + 8).to(torch.uint8)
    blocks = q.view(-1, 2, _CPU_ROWS // 2, 2 * half)
    return (blocks[:, 0] | blocks[:, 1] << 4).transpose(1, 2).contiguous().view(N, half)


def from_cpu(packed: Tensor) -> Tensor:
    """Unpack the bytes of `for_cpu` to the transposed matrix, (K, N) int8 in [-8, 7], which is contiguous in whole rows of blocks."""
    N, half = packed.shape
    blocks = packed.view(N // _CPU_ROWS, 2 * half, _CPU_ROWS // 2)
    both = torch.cat((blocks & 15, blocks >> 4), -1).to(torch.int8) - 8
    return both.transpose(0, 1).reshape(2 * half, N)


@cache
def cpu_reads_blocks() -> bool:
    """Whether PyTorch's int4 product exists here and packs like `for_cpu`, as with AVX-512."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    q = torch.randint(0, 16, (2 * _CPU_ROWS, 64), generator=generator, dtype=torch.int32)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    return torch.equal(theirs, for_cpu(nibbles((q - 8).to(torch.int8))))
