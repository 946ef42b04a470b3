"""Routed experts with quantised matrices, which replace `GroupedExperts` for inference."""

from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.moe.experts import ExpertParameters, GroupedExperts, call_of_module
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.op_set import OpSet
from expertmesh.ops.quantized.rounding import BLOCK, Format

_VALUES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}


class QuantizedExperts(nn.Module):
    """E experts in 8 or 4 bits. All tensors are buffers without gradients.

    Buffers: w_in and w_out with w_in_scale and w_out_scale, in the formats of `ops/experts/quantized_formats.py`; with
    bias b_in (E, G, F) and b_out (E, D), not quantised.

    Args:
        like: the experts to replace; only sizes and options are read.
        format: int8, int4 or fp8.
        group_size: input columns per scale of int4.
        scale_dtype: the dtype of the scales.
        device: the device of the buffers.
    """

    w_in: Tensor
    w_out: Tensor
    w_in_scale: Tensor
    w_out_scale: Tensor
    b_in: Tensor | None
    b_out: Tensor | None

    def __init__(
        self,
        like: GroupedExperts,
        *,
        format: Format,
        group_size: int,
        scale_dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        E, G, F, D = like.w_in.shape
        self.num_experts, self.activation, self.backend = E, like.activation, like.backend
        self.arithmetic: OpSet = like.arithmetic
        self.format: str = format
        for name, shape in {"w_in": (E, G, F, D), "w_out": (E, D, F)}.items():
            *_, N, K = shape
            stored = (*shape[:-1], K // 2) if format == "int4" else shape
            scales = {
                "int8": (*shape[:-1], 1),
                "int4": (*shape[:-1], K // group_size),
                "fp8": (*shape[:-2], -(-N // BLOCK), -(-K // BLOCK)),
            }[format]
            values = torch.empty(stored, dtype=_VALUES[format], device=device)
            self.register_buffer(name, values)
            empty = torch.empty(scales, dtype=scale_dtype, device=device)
            self.register_buffer(f"{name}_scale", empty)
        for name in ("b_in", "b_out"):
            bias = getattr(like, name)
            kept = None if bias is None else torch.empty_like(bias, device=device)
            self.register_buffer(name, kept)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedExperts":
        """Move to another device; dtypes stay, because a rounded scale is another weight."""

        def moved(tensor: Tensor) -> Tensor:
            found: Tensor = fn(tensor)
            if found.dtype == tensor.dtype:
                return found
            return tensor if found.device == tensor.device else tensor.to(found.device)

        super()._apply(moved, recurse)
        return self

    def forward(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        max_rows: int | None,
        parameters: ExpertParameters | None = None,
    ) -> Tensor:
        """Compute as `GroupedExperts.forward` does; for inference only."""
        own = self.weights() if parameters is None else parameters.weights
        call = call_of_module(self, x_TD, weights_TK, own, expert_ids_TK)
        return compute(call, max_rows=max_rows)

    def weights(self) -> ExpertWeights:
        """Buffers as the operators take them."""
        return ExpertWeights(
            (self.w_in,),
            (self.w_out,),
            self.activation,
            () if self.b_in is None else (self.b_in,),
            self.b_out,
            self.format,
            (self.w_in_scale,),
            (self.w_out_scale,),
        )
