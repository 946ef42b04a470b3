"""Bytes of parameters that rest under adapters, by the format that they are kept in, without torch.

`ops/experts/quantized_formats.py` has the formats themselves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

WIDENED_BYTES = 256 << 20
"""Bytes of matrices that a GPU widens at once for a product of many rows; at least four experts'."""
_BLOCK = 128
"""Rows and columns of a block in FP8."""


class StoredLayout(NamedTuple):
    """Storage of a format."""

    bits: int  # bits of a number; 0: the type of the products
    # number of scales, by a matrix' shape and the group size
    num_scales: Callable[[Sequence[int], int], int] = lambda shape, group: 0
    scale_bytes: int = 0  # bytes of a scale; 0: the type of the products


def _groups(shape: Sequence[int], group: int) -> int:
    return math.prod(shape) // group


def _blocks(shape: Sequence[int], _: int) -> int:
    *lead, rows, columns = shape
    return math.prod(lead) * -(-rows // _BLOCK) * -(-columns // _BLOCK)


LAYOUTS: Mapping[str, StoredLayout] = {
    "products": StoredLayout(0),
    "float32": StoredLayout(32),
    "int8": StoredLayout(8, lambda shape, _: math.prod(shape[:-1])),
    "int4": StoredLayout(4, _groups),
    "nf4": StoredLayout(4, _groups, 4),
    "fp8": StoredLayout(8, _blocks),
    "mxfp4": StoredLayout(4, lambda shape, _: _groups(shape, 32), 1),
}
"""Formats by name: "products" is the type of the products."""


class Resting(NamedTuple):
    """Storage of a parameter that rests."""

    format: str  # name in `LAYOUTS`
    group_size: int = 64  # input columns per scale, where the format leaves it open

    @property
    def is_packed(self) -> bool:
        """Whether it is kept as codes with scales, which products widen."""
        return self.format not in ("products", "float32")

    def num_bytes(self, shape: Sequence[int], *, element_bytes: int) -> float:
        """Bytes of a tensor, scales included.

        Args:
            shape: sizes of the tensor, or of a rank's part of it.
            element_bytes: bytes of an element in the type of the products.

        Example:
            >>> from expertmesh.spec.resting import Resting
            >>> Resting("int4").num_bytes((128, 2, 768, 2048), element_bytes=2) / 2**20
            204.0
        """
        bits, num_scales, scale_bytes = LAYOUTS[self.format]
        codes = math.prod(shape) * (bits or 8 * element_bytes) / 8
        return codes + num_scales(shape, self.group_size) * (scale_bytes or element_bytes)
