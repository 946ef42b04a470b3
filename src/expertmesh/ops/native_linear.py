"""Dense products on a CPU by the kernels in C (`kernels/cpu`): one order of sums for every number of rows, without
trials."""

import torch
from torch import Tensor

from expertmesh.kernels.cpu.library import loaded
from expertmesh.ops.plain_call import cpu_operator, runs_plainly

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


def is_only_way(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether inference has one way for these tensors: products of BF16 by the processor's own instructions."""
    kernels = loaded().kernels
    return (
        kernels is not None
        and kernels.instructions.has_bf16
        and x.dtype == torch.bfloat16
        and all(t.is_cpu and t.dtype in _DTYPES for t in (x, *weights) if t is not None)
    )


def linear(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
    """Compute x W^T + b, (R, N) in x's dtype, for what `serves` accepts; not seen by autograd."""
    kernels = loaded().kernels
    assert kernels is not None
    return kernels.linear(x_RK.contiguous(), w_NK[None], None if b_N is None else b_N[None])


def serves_each(x: Tensor, w_ENK: Tensor, b_EN: Tensor | None = None) -> bool:
    """Whether `head_linear` and `linear_of_each` take these tensors."""
    given = (x, w_ENK) if b_EN is None else (x, w_ENK, b_EN)
    return all(t.is_cpu and t.dtype == x.dtype for t in given) and x.dtype in _DTYPES and loaded().kernels is not None


def linear_of_each(x_RK: Tensor, w_ENK: Tensor, b_EN: Tensor | None, ids_R: Tensor) -> Tensor:
    """Compute x W^T + b, (R, N), each row with its own of E matrices, with the bits of `linear`; not seen by
    autograd."""
    kernels = loaded().kernels
    assert kernels is not None
    w_ENK = w_ENK if w_ENK.stride(-1) == 1 else w_ENK.contiguous()
    b_EN = None if b_EN is None else b_EN.contiguous()
    return kernels.linear(x_RK.contiguous(), w_ENK, b_EN, ids_R[:, None].contiguous())


def head_linear(x_THn: Tensor, w_Hmn: Tensor) -> Tensor:
    """Compute each head times its own matrix, (T, H, m), in one call, with the bits of `linear`; not seen by
    autograd."""
    run = _head_linear if runs_plainly(x_THn, w_Hmn) else _head_linear_operator
    y_THm: Tensor = run(x_THn, w_Hmn)
    return y_THm


def _head_linear(x_THn: Tensor, w_Hmn: Tensor) -> Tensor:
    (T, H, n), m = x_THn.shape, w_Hmn.shape[1]
    return linear_of_each(x_THn.reshape(-1, n), w_Hmn, None, torch.arange(H).repeat(T)).view(T, H, m)


_head_linear_operator = cpu_operator(
    "native_head_linear(Tensor x_THn, Tensor w_Hmn) -> Tensor",
    _head_linear,
    lambda x_THn, w_Hmn: x_THn.new_empty(x_THn.shape[0], *w_Hmn.shape[:2]),
)
