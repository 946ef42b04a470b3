"""Quantised formats of experts' weights, in `FORMATS` of `ops/experts/weights.py`.

| name | w_in, w_out | scales |
|---|---|---|
| int8 | int8, as dense | (E, G, F, 1), (E, D, 1) |
| int4 | two numbers to a byte, (E, G, F, D / 2) and (E, D, F / 2) | (E, G, F, D / g), (E, D, F / g) |
| fp8 | float8_e4m3fn, as dense | (E, G, F / 128, D / 128), (E, D / 128, F / 128) rounded up |
| mxfp4 | as int4 | uint8 exponents, (E, G, F, D / 32), (E, D, F / 32) |
| nf4 | as int4 | FP32, (E, G, F, D / g), (E, D, F / g) |
"""

from typing import cast

import torch
from torch import Tensor

from expertmesh.ops.experts.weights import FORMATS, ExpertSlice, Kept, Shape, WeightFormat
from expertmesh.ops.quantized import mxfp4, nf4
from expertmesh.ops.quantized.pack import from_nibbles, nibbles
from expertmesh.ops.quantized.rounding import BLOCK, Format, Rounded, rounded, widened


class QuantizedFormat(WeightFormat):
    """Format of values with scales; this class has one byte per number and scales that `widened` takes."""

    name: str = "int8"  # see `WeightFormat`; a format of `rounded`
    backends: tuple[str, ...] = ("native", "quantized_triton", "adapters", "torch")

    def kept(self, shape: Shape, dtype: torch.dtype, group_size: int = 64) -> dict[str, Kept]:
        """See `WeightFormat`: int8 with a scale per row."""
        return {"": (shape, torch.int8), "_scale": ((*shape[:-1], 1), dtype)}

    def pack(self, w: Tensor, dtype: torch.dtype, group_size: int = 64) -> dict[str, Tensor]:
        """See `WeightFormat`."""
        values, scales = rounded(w, cast(Format, self.name), group_size=group_size, scale_dtype=dtype)
        return {"": values, "_scale": scales}

    def unpack(self, experts: ExpertSlice, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `WeightFormat`; rounded to the dtype of the scales first, as compressed-tensors does."""
        return self.unpack_in(experts, e, dtype), self.unpack_out(experts, e, dtype)

    def unpack_in(self, experts: ExpertSlice, e: int, dtype: torch.dtype) -> Tensor:
        """Unpack the first matrix only."""
        assert experts.scales_in is not None
        # each branch separately, because an FP8 block does not span two branches
        return self.wide(experts.w_in_EGFD[e], experts.scales_in[e], dtype).flatten(0, -2)

    def unpack_out(self, experts: ExpertSlice, e: int, dtype: torch.dtype) -> Tensor:
        """Unpack the second matrix only."""
        assert experts.scales_out is not None
        return self.wide(experts.w_out_EDF[e], experts.scales_out[e], dtype)

    def wide_shape(self, kept: Shape) -> Shape:
        """Shape of matrices once widened, from the shape of their values."""
        return kept

    def wide(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Widen a matrix for its product."""
        return widened(Rounded(values, scales), dtype)


class Fp8(QuantizedFormat):
    """FP8 (e4m3) with one scale per block of 128 by 128."""

    name: str = "fp8"
    backends: tuple[str, ...] = ("quantized_triton", "adapters", "torch")

    def kept(self, shape: Shape, dtype: torch.dtype, group_size: int = 64) -> dict[str, Kept]:
        """See `WeightFormat`."""
        *lead, N, K = shape
        scales = (*lead, -(-N // BLOCK), -(-K // BLOCK))
        return {"": (shape, torch.float8_e4m3fn), "_scale": (scales, dtype)}

    def unit(self, experts: ExpertSlice) -> int:
        """See `WeightFormat`: a block."""
        return BLOCK


class Int4(QuantizedFormat):
    """Four bits per number, with one scale per group of columns."""

    name: str = "int4"

    def columns(self, group_size: int) -> int:
        """See `WeightFormat`: a group."""
        return group_size

    def kept(self, shape: Shape, dtype: torch.dtype, group_size: int = 64) -> dict[str, Kept]:
        """See `WeightFormat`."""
        *lead, K = shape
        return {"": ((*lead, K // 2), torch.uint8), "_scale": ((*lead, K // group_size), dtype)}

    def pack(self, w: Tensor, dtype: torch.dtype, group_size: int = 64) -> dict[str, Tensor]:
        """See `WeightFormat`."""
        found = super().pack(w, dtype, group_size)
        return {**found, "": nibbles(found[""])}

    def wide_shape(self, kept: Shape) -> Shape:
        """See `QuantizedFormat`."""
        return (*kept[:-1], 2 * kept[-1])

    def shape(self, experts: ExpertSlice) -> tuple[int, int, int, int]:
        """See `WeightFormat`."""
        E, G, F, D = self.wide_shape(experts.w_in_EGFD.shape)
        return E, G, F, D

    def unit(self, experts: ExpertSlice) -> int:
        """See `WeightFormat`: a group of w_out's columns."""
        assert experts.scales_out is not None
        return 2 * experts.w_out_EDF.shape[-1] // experts.scales_out.shape[-1]

    def wide(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `QuantizedFormat`."""
        return widened(Rounded(from_nibbles(values), scales), dtype)


class Mxfp4(Int4):
    """MXFP4: 4-bit floating-point numbers with one power of two per 32 columns."""

    name: str = "mxfp4"
    backends: tuple[str, ...] = ("quantized_triton", "adapters", "torch")

    def columns(self, group_size: int) -> int:
        """See `WeightFormat`: a block."""
        return mxfp4.BLOCK

    def kept(self, shape: Shape, dtype: torch.dtype, group_size: int = 64) -> dict[str, Kept]:
        """See `WeightFormat`."""
        return super().kept(shape, torch.uint8, mxfp4.BLOCK)

    def pack(self, w: Tensor, dtype: torch.dtype, group_size: int = 64) -> dict[str, Tensor]:
        """See `WeightFormat`."""
        return dict(zip(("", "_scale"), mxfp4.packed(w), strict=True))

    def wide(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `QuantizedFormat`; exact in BF16."""
        return mxfp4.widened(values.unflatten(-1, (-1, mxfp4.BLOCK // 2)), scales).to(dtype)


class Nf4(Int4):
    """NF4: the levels of a normal distribution, with the largest number of each group of columns as its scale."""

    name: str = "nf4"
    backends: tuple[str, ...] = ("quantized_triton", "adapters", "torch")

    def kept(self, shape: Shape, dtype: torch.dtype, group_size: int = 64) -> dict[str, Kept]:
        """See `WeightFormat`; scales in FP32."""
        return super().kept(shape, torch.float32, group_size)

    def pack(self, w: Tensor, dtype: torch.dtype, group_size: int = 64) -> dict[str, Tensor]:
        """See `WeightFormat`."""
        return dict(zip(("", "_scale"), nf4.packed(w, group_size), strict=True))

    def wide(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `QuantizedFormat`; rounded to the dtype once."""
        return nf4.widened(values, scales).to(dtype)


QUANTIZED: dict[str, QuantizedFormat] = {one.name: one for one in (QuantizedFormat(), Int4(), Fp8(), Mxfp4(), Nf4())}
"""Quantised formats by name."""
FORMATS.update(QUANTIZED)
