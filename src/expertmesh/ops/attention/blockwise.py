"""Causal attention of many queries on a CPU without AMX and without gradients, as batched products over blocks of queries.

PyTorch's fused attention in BF16 takes twice as long as this one without AMX, and a fifth of its time with AMX
(docs/log.md). All query heads of a key head are rows of one product, and a block's scores stay in the cache.
"""

import math

import torch
from torch import Tensor

BLOCK_ROWS = 128
"""Rows of one product: queries times query heads per key head. With more rows PyTorch's batched product takes a slower path."""


def serves(q_BHSd: Tensor, k_BhLd: Tensor, *, has_amx: bool | None = None) -> bool:
    """Whether `causal_attention` supports this call and is the fastest choice.

    Args:
        q_BHSd: queries.
        k_BhLd: keys.
        has_amx: whether the processor has AMX; None: ask it.
    """
    return (
        q_BHSd.device.type == "cpu"
        and q_BHSd.dtype == torch.bfloat16
        and q_BHSd.shape[0] == 1
        and q_BHSd.shape[2] > 1
        and not (torch.cpu._is_amx_tile_supported() if has_amx is None else has_amx)
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and (q_BHSd.requires_grad or k_BhLd.requires_grad))
    )


def causal_attention(q_BHSd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
    """Compute causal softmax(q k^T / sqrt(d)) v; not differentiable.

    Args:
        q_BHSd: (1, H, S, d) queries, the last S of L tokens.
        k_BhLd: (1, h, L, d) keys; h divides H.
        v_BhLd: (1, h, L, d) values.

    Returns:
        (1, H, S, d) in the type of q; scores and softmax are FP32.
    """
    (_, H, S, d), (_, h, L, _) = q_BHSd.shape, k_BhLd.shape
    q_hGSd = q_BHSd[0].unflatten(0, (h, -1))
    # contiguous per head, because a batched product with strides is half as fast
    k_hdL, v_hLd = k_BhLd[0].contiguous().mT, v_BhLd[0].contiguous()
    y_hGSd = q_hGSd.new_empty(h, H // h, S, v_hLd.shape[2])
    size = max(BLOCK_ROWS * h // H, 16)
    hides = torch.full((size, size), -math.inf, device=q_BHSd.device).triu_(1)
    for start in range(0, S, size):
        stop = min(start + size, S)
        count, seen = stop - start, L - S + stop
        q_hRd = q_hGSd[:, :, start:stop].flatten(1, 2)
        s_hRL = torch.bmm(q_hRd, k_hdL[:, :, :seen]).float()
        s_hRL.mul_(d**-0.5).unflatten(1, (-1, count))[..., seen - count :] += hides[:count, :count]
        p_hRL = torch.softmax(s_hRL, -1).to(v_hLd.dtype)
        y_hGSd[:, :, start:stop] = torch.bmm(p_hRL, v_hLd[:, :seen]).unflatten(1, (-1, count))
    return y_hGSd.flatten(0, 1)[None]
