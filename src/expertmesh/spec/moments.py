"""Bytes of the optimizer's moments of a tensor, for each state dtype, without torch.

Moments stay in FP32 (FP64 in a float64 run) for tensors with one axis or few elements, and with int8 for tensors whose
cut of the last axis over ranks falls inside a block. All other tensors use the requested dtype. Torchao's dtypes apply
to every part that is large and consists of whole blocks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from expertmesh.config.run import StateDtype

FEWEST_ELEMENTS = 4096
"""Elements below which a tensor's moments stay in FP32; bitsandbytes and torchao have the same limit."""
BLOCK = 64
"""Elements along the last axis that share a scale in int8; fewer where the axis is short."""
_SMALLEST_BLOCK = 8


def block_size(width: int) -> int:
    """Elements along the last axis that share a scale: a quarter of the axis as a power of two, 8 to 64.

    It depends on the whole tensor alone, so that every layout over ranks has the same blocks.

    Example:
        >>> from expertmesh.spec.moments import block_size
        >>> block_size(4096), block_size(128), block_size(3)
        (64, 32, 8)
    """
    quarter = max(width // 4, 1)
    return min(max(1 << (quarter.bit_length() - 1), _SMALLEST_BLOCK), BLOCK)


class Format(NamedTuple):
    """Storage of a moment."""

    bits: int  # bits of an element
    # FP32 numbers beside the elements, such as scales, by the whole tensor's shape and the part's
    num_floats: Callable[[Sequence[int], Sequence[int]], int] = lambda shape, part: 0
    # elements contiguous in memory that share a scale in torchao's formats; 0: the format is ours
    torchao_block: int = 0


FORMATS: Mapping[StateDtype, Format] = {
    "float32": Format(32),
    "bfloat16": Format(16),
    "int8": Format(8, lambda s, part: math.prod(part[:-1]) * -(-part[-1] // block_size(s[-1]))),
    "fp16-scaled": Format(16, lambda shape, part: 1),
    "torchao-int8": Format(8, lambda shape, part: math.prod(part) // 256 + 2**8, 256),
    "torchao-int4": Format(4, lambda shape, part: math.prod(part) // 128 + 2**4, 128),
}
"""All formats; torchao's have a table of the value of each code, too."""


def is_compact(shape: Sequence[int], part: Sequence[int], state_dtype: StateDtype) -> bool:
    """Whether a tensor has its moments in the requested dtype.

    Args:
        shape: shape of the whole tensor.
        part: shape of one rank's part of it.
    """
    if block := FORMATS[state_dtype].torchao_block:
        return math.prod(part) >= FEWEST_ELEMENTS and math.prod(part) % block == 0
    if state_dtype == "float32" or len(shape) < 2 or math.prod(shape) < FEWEST_ELEMENTS:
        return False
    is_cut = part[-1] != shape[-1]
    return state_dtype != "int8" or not is_cut or part[-1] % block_size(shape[-1]) == 0


def moment_bytes(shape: Sequence[int], part: Sequence[int], state_dtype: StateDtype, *, master: int = 4) -> int:
    """Bytes of one moment of one rank's part of a tensor.

    Args:
        shape: shape of the whole tensor.
        part: shape of the rank's part of it.
        master: bytes of an element of the parameter.

    Example:
        >>> from expertmesh.spec.moments import moment_bytes
        >>> moment_bytes((64, 4096), (64, 4096), "int8")  # 1 for each element, 4 for each block of 64
        278528
    """
    elements = math.prod(part)
    if not is_compact(shape, part, state_dtype):
        return elements * master
    form = FORMATS[state_dtype]
    return elements * form.bits // 8 + 4 * form.num_floats(shape, part)
