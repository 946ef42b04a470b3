"""Products with a weight that oneDNN has brought into its own order once, where `F.linear` does so in every call."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.cpu.products import has_onednn

MOST_ROWS = 64
"""With more, bringing the weight into order costs nothing to speak of beside the product."""
_ROWS_TOLD = 16
"""That oneDNN chooses the order for."""


class PackedWeights:
    """Packed copies of weights, made when they are first used, and again when the weights have changed."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[Tensor, int, Any]] = {}

    def linear(self, x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
        """x W^T + b for rows (R, K); not seen by autograd."""
        if x_RK.shape[0] > MOST_ROWS or x_RK.dtype != w_NK.dtype or not _can_pack(x_RK.dtype):
            return F.linear(x_RK, w_NK, b_N)
        found, version = self._packed.get(id(w_NK)), 0 if w_NK.is_inference() else w_NK._version
        if found is None or found[0] is not w_NK or found[1] != version:
            packed = torch.ops.mkldnn._reorder_linear_weight(w_NK.detach(), _ROWS_TOLD)
            found = self._packed[id(w_NK)] = (w_NK, version, packed)
        y_RN: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x_RK, found[2], b_N, "none", [], ""
        )
        return y_RN


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    if not has_onednn():
        return False
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16())
