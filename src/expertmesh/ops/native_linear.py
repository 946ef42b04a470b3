"""Dense products on a CPU by the kernels in C (`kernels/cpu`): one order of sums for every number of rows, without trials."""

import torch
from torch import Tensor

from expertmesh.kernels.cpu.library import loaded

MOST_ROWS = 64
"""Number of rows up to which BF16 products are faster than PyTorch's, for every size of weight (docs/log.md)."""
_DTYPES = (torch.bfloat16, torch.float32)


def serves(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None) -> bool:
    """Whether `linear` computes x W^T + b; PyTorch refuses sizes that do not fit."""
    given = (x_RK, w_NK) if b_N is None else (x_RK, w_NK, b_N)
    return (
        all(t.is_cpu and t.dtype == x_RK.dtype for t in given)
        and x_RK.dtype in _DTYPES
        and w_NK.dim() == 2
        and x_RK.shape[-1] == w_NK.shape[1]
        and w_NK.stride(-1) == 1
        and (b_N is None or (b_N.shape == w_NK.shape[:1] and b_N.stride(0) == 1))
        and loaded().kernels is not None
    )


def is_faster(x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> bool:
    """Whether `linear` computes x (..., K) W^T + b and is faster than PyTorch: few BF16 rows, by the processor's own instructions."""
    if x.dtype != torch.bfloat16 or x.numel() > MOST_ROWS * x.shape[-1] or x.numel() == 0:
        return False
    kernels = loaded().kernels
    return kernels is not None and kernels.instructions.has_bf16 and serves(x, w_NK, b_N)


def linear(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """Compute x W^T + b, (R, N) in x's dtype, for what `serves` accepts; not seen by autograd."""
    kernels = loaded().kernels
    assert kernels is not None
    return kernels.linear(x_RK.contiguous(), w_NK, b_N)
