"""Products by oneDNN with weights that can be packed once, instead of in every call."""

from functools import cache

import torch
from torch import Tensor

_ROWS_TOLD = 16
"""Number of rows that oneDNN is told when it chooses the packed order."""


def has_onednn() -> bool:
    """Whether oneDNN can multiply on this machine."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether weights of a dtype can be packed on this machine."""
    if not has_onednn():
        return False
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16())


def pack(w_NK: Tensor) -> Tensor:
    """Pack a weight in oneDNN's preferred order; only `onednn_linear` reads it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(w_NK.detach(), _ROWS_TOLD)
    return packed


def onednn_linear(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + b of rows (R, K) and a weight, plain or from `pack`; not seen by autograd."""
    y_RN: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_RK, w_NK, b_N, "none", [], "")
    return y_RN
