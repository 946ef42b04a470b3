"""Dense blocks beside the routed experts: shared experts with their gate, and PR-MoE's residual MLP with its mixing
coefficients."""

from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.moe.module_adapters import ModuleAdapters
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.op_set import DEFAULT_OPS, OpSet, with_adapter


class Linear(nn.Linear):
    """`nn.Linear` whose product is computed by the model's op set. It is called as a module, so that wrappers of
    modules (adapters, offload) reach it."""

    def __init__(
        self,
        in_features: int,  # K
        out_features: int,  # N
        *,
        bias: bool = False,  # whether there is a bias (N,)
        arithmetic: OpSet = DEFAULT_OPS,  # the op set in evaluation
        backend: str = "auto",  # read by the batch-invariant op set only
        device: torch.device | str | None = None,  # the device of the parameters
        dtype: torch.dtype | None = None,  # the type of the parameters
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.arithmetic, self.backend = arithmetic, backend
        self.adapters: ModuleAdapters | None = None

    @property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Shape of the matrix, which may have an adapter, by name."""
        return {"weight": (self.out_features, self.in_features)}

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """(..., in_features) -> (..., out_features); `weight` is the whole matrix where ranks store parts of it."""
        weight = self.weight if weight is None else weight
        linear, how = self.arithmetic.in_mode(self.training).linear, {"backend": self.backend}
        y = linear(x, weight, self.bias, **how)
        if self.adapters is None or self.adapters.weight is None:
            return y
        return with_adapter(y, x, self.adapters.weight(), linear, **how)


DenseParts = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(mix_T2, residual_TD, shared_TD) of one call, each None if the layer has no such part: (T, 2) mixing coefficients of
the experts and of the residual MLP in FP32 or FP64; (T, D) output of the residual MLP; (T, D) output of the shared
experts.
"""


def dense_parts(layer: Any, x_TD: Tensor) -> DenseParts:
    """Compute the dense blocks of a MoELayer for tokens (T, D); they do not depend on the routed experts."""
    arithmetic = layer.arithmetic.in_mode(layer.training)
    mix_T2 = residual_TD = shared_TD = None
    if layer.residual_mlp is not None:
        raw_T2 = layer.residual_coefficient(x_TD)
        mix_T2 = arithmetic.softmax(raw_T2.to(accumulate_dtype(x_TD.dtype)))
        residual_TD = layer.residual_mlp(x_TD)
    if layer.shared_experts is not None:
        shared_TD = layer.shared_experts(x_TD)
        if layer.shared_gate is not None:
            raw_T1 = layer.shared_gate(x_TD)
            share_T1 = arithmetic.sigmoid(raw_T1.to(accumulate_dtype(raw_T1.dtype)))
            shared_TD = shared_TD * share_T1.to(raw_T1.dtype)
    return mix_T2, residual_TD, shared_TD


def add_dense(y_TD: Tensor, parts: DenseParts, token_mask_T: Tensor | None) -> Tensor:
    """Mix the residual MLP into the experts' output, add the shared experts, and zero masked tokens."""
    mix_T2, residual_TD, shared_TD = parts
    if mix_T2 is not None and residual_TD is not None:
        y_TD = mix_T2[:, :1] * y_TD + mix_T2[:, 1:] * residual_TD
    if shared_TD is not None:
        y_TD = y_TD + shared_TD
    return y_TD if token_mask_T is None else y_TD.masked_fill(~token_mask_T[:, None], 0)
