"""Quantised formats of experts' weights, in `FORMATS` of `ops/experts/weights.py`.

| name | w_in, w_out | scales |
|---|---|---|
| int8 | int8, as dense | (E, G, F, 1), (E, D, 1) |
| int4 | two numbers to a byte, (E, G, F, D / 2) and (E, D, F / 2) | (E, G, F, D / g), (E, D, F / g) |
| fp8 | float8_e4m3fn, as dense | (E, G, F / 128, D / 128), (E, D / 128, F / 128) rounded up |
"""

import torch
from torch import Tensor

from expertmesh.ops.experts.weights import FORMATS, ExpertSlice, WeightFormat
from expertmesh.ops.quantized.pack import from_nibbles
from expertmesh.ops.quantized.rounding import BLOCK, Rounded, widened


class QuantizedFormat(WeightFormat):
    """Format of values with scales; this class has one byte per number and scales that `widened` takes."""

    backends: tuple[str, ...] = ("native", "quantized_triton", "torch")

    def num_bytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """See `WeightFormat`; dtype is the dtype of the scales."""
        E, G, F, D = shape
        return E * ((G + 1) * F * D + (G * F + D) * dtype.itemsize)

    def unpack(self, experts: ExpertSlice, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `WeightFormat`; rounded to the dtype of the scales first, as compressed-tensors does."""
        return self.unpack_in(experts, e, dtype), self.unpack_out(experts, e, dtype)

    def unpack_in(self, experts: ExpertSlice, e: int, dtype: torch.dtype) -> Tensor:
        """Unpack the first matrix only."""
        assert experts.scales_in is not None
        # each branch separately, because an FP8 block does not span two branches
        return self.wide(experts.w_in_EGFD[e], experts.scales_in[e], dtype).flatten(0, 1)

    def unpack_out(self, experts: ExpertSlice, e: int, dtype: torch.dtype) -> Tensor:
        """Unpack the second matrix only."""
        assert experts.scales_out is not None
        return self.wide(experts.w_out_EDF[e], experts.scales_out[e], dtype)

    def wide(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Widen a matrix for its product."""
        return widened(Rounded(values, scales), dtype)


class Fp8(QuantizedFormat):
    """FP8 (e4m3) with one scale per block of 128 by 128."""

    backends: tuple[str, ...] = ("quantized_triton", "torch")

    def num_bytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """See `WeightFormat`; dtype is the dtype of the scales."""
        E, G, F, D = shape
        blocks = -(-F // BLOCK) * -(-D // BLOCK)
        return E * (G + 1) * (F * D + blocks * dtype.itemsize)

    def unit(self, experts: ExpertSlice) -> int:
        """See `WeightFormat`: a block."""
        return BLOCK


class Int4(QuantizedFormat):
    """Four bits per number, with one scale per group of columns."""

    def num_bytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """See `WeightFormat`; for groups of 64; dtype is the dtype of the scales."""
        E, G, F, D = shape
        return E * (G + 1) * F * (D // 2 + -(-D // 64) * dtype.itemsize)

    def shape(self, experts: ExpertSlice) -> tuple[int, int, int, int]:
        """See `WeightFormat`."""
        E, G, F, half = experts.w_in_EGFD.shape
        return E, G, F, 2 * half

    def unit(self, experts: ExpertSlice) -> int:
        """See `WeightFormat`: a group of w_out's columns."""
        assert experts.scales_out is not None
        return 2 * experts.w_out_EDF.shape[-1] // experts.scales_out.shape[-1]

    def wide(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `QuantizedFormat`."""
        return widened(Rounded(from_nibbles(values), scales), dtype)


QUANTIZED: dict[str, QuantizedFormat] = {
    "int8": QuantizedFormat(),
    "int4": Int4(),
    "fp8": Fp8(),
}
"""Quantised formats by name."""
FORMATS.update(QUANTIZED)
