"""Packed copies of weights, for products of few rows."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops.onednn import can_pack, onednn_linear, pack

MOST_ROWS = 64
"""Maximum number of rows of a product with a packed weight; with more, the library's own packing costs little beside the product."""


class PackedWeights:
    """Packed copies of weights, made on first use, and again after a counted change of a weight or `clear`."""

    def __init__(self) -> None:
        self._packed: dict[int, tuple[Tensor, int, Any]] = {}

    def clear(self) -> None:
        """Drop all copies, as after changes through `p.data`, which PyTorch does not count."""
        self._packed.clear()

    def linear(self, x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
        """Compute x W^T + b for rows (R, K); not seen by autograd."""
        if x_RK.shape[0] > MOST_ROWS or x_RK.dtype != w_NK.dtype or not can_pack(x_RK.dtype):
            return F.linear(x_RK, w_NK, b_N)
        found, version = self._packed.get(id(w_NK)), 0 if w_NK.is_inference() else w_NK._version
        if found is None or found[0] is not w_NK or found[1] != version:
            found = self._packed[id(w_NK)] = (w_NK, version, pack(w_NK))
        return onednn_linear(x_RK, found[2], b_N)
