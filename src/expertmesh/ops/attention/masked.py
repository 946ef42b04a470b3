"""Masked attention over short sequences on a CPU, in training, as batched matrix products.

PyTorch's fused attention takes up to ten times as long for the backward pass of short sequences (docs/log.md).
"""

import torch
from torch import Tensor

from expertmesh.ops.dtypes import accumulate_dtype

LONGEST = 256
"""Longest sequence for which products were measured to be faster."""


def serves(q_BHSd: Tensor, k_BHSd: Tensor) -> bool:
    """Whether `masked_attention` is the fastest choice: short sequences on a CPU with gradients, equally many heads of keys and queries."""
    return (
        q_BHSd.device.type == "cpu"
        and torch.is_grad_enabled()
        and q_BHSd.requires_grad
        and q_BHSd.shape[1] == k_BHSd.shape[1]
        and max(q_BHSd.shape[2], k_BHSd.shape[2]) <= LONGEST
    )


def masked_attention(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, mask: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) where the mask is True) v; the softmax in FP32 or FP64.

    Args:
        q_BHSd: (B, H, S, d) queries.
        k_BHSd: (B, H, S', d) keys.
        v_BHSd: (B, H, S', d) values.
        mask: bool, broadcastable to (B, H, S, S'), True for visible keys; each query needs one.

    Returns:
        (B, H, S, d) in the dtype of q.
    """
    scores = (q_BHSd * q_BHSd.shape[-1] ** -0.5) @ k_BHSd.transpose(-1, -2)
    dtype = accumulate_dtype(scores.dtype)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=dtype)
    return weights.to(v_BHSd.dtype) @ v_BHSd
