"""Packed layouts of quantised numbers of compressed-tensors files."""

import sys

import torch
from torch import Tensor


def nibbles(values: Tensor) -> Tensor:
    """Pack (..., K) numbers in [-8, 7] two to a byte, (..., K / 2) uint8: offset by 8, the first number in the low
    half."""
    offset = (values.to(torch.int16) + 8).to(torch.uint8)
    return offset[..., ::2] | offset[..., 1::2] << 4


def from_nibbles(packed: Tensor) -> Tensor:
    """Unpack the bytes of `nibbles`: (..., K) int8."""
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return both.to(torch.int8) - 8


def to_words(values: Tensor, bits: int) -> Tensor:
    """Pack (N, K) numbers into (N, K * bits / 32) int32 words, rounded up: offset binary, the first number in the low
    bits."""
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
