"""Products of sorted rows with their experts' matrices, as one autograd operator.

For experts that `moe_mlp` does not support: the caller computes what lies between the products.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops import triton_linear
from expertmesh.ops.backend import uses_triton
from expertmesh.ops.check import check_like
from expertmesh.ops.cpu import grouped_linear as loop
from expertmesh.ops.dtypes import autocast_dtype, without_autocast
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.transforms import refuse_second_derivative, refuse_transforms


def grouped_linear(
    x_RK: Tensor,
    w: Tensor,
    offsets_E: Tensor,
    *,
    b_EN: Tensor | None = None,
    transposed: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Multiply every row by its expert's matrix: y_r = x_r W[e]^T + b[e].

    Autograd saves x (if w needs a gradient), w and the offsets. Gradients are bitwise deterministic. Sums are FP32
    (FP64 for FP64). Rows behind the last live one are not read: their results and gradients are zero. The second
    derivative is an error.

    Args:
        x_RK: (R, K) rows sorted by expert, as `permute` gives them: float64, float32, bfloat16 or float16. Under
            autocast all tensors are cast to its type here.
        w: (E, N, K), or (E, K, N) with `transposed`; in the dtype of x.
        offsets_E: (E + 1,) int32 from 0 to at most R, not decreasing, `RouteMetadata.offsets_E`.
        b_EN: (E, N) biases, or None.
        transposed: whether the matrices are stored as (K, N).
        backend: see `resolve_backend`; "reference" means "torch" here, and FP64 runs on PyTorch's products.

    Returns:
        (R, N) in the dtype of x.

    Raises:
        ConfigError: shapes or types do not fit one another, or offsets are none (the torch backend looks).
    """
    dtype = autocast_dtype(x_RK.device)
    if dtype is not None and x_RK.dtype != torch.float64:
        x_RK, w = x_RK.to(dtype), w.to(dtype)
        b_EN = None if b_EN is None else b_EN.to(dtype)
    check_rows_and_matrices(x_RK, w, offsets_E, b_EN, transposed=transposed)
    refuse_transforms("grouped_linear", lambda: [x_RK, w, b_EN])
    name = "triton" if uses_triton(backend, x_RK.device, x_RK.dtype) else "torch"
    if name == "torch" and runs_plainly(x_RK, w, b_EN):
        return loop.forward(x_RK, w, offsets_E, b_EN, transposed=transposed)
    y: Tensor = _grouped_linear(x_RK, w, offsets_E, b_EN, transposed, name)
    return y


def check_rows_and_matrices(
    x_RK: Tensor, w: Tensor, offsets_E: Tensor, b_EN: Tensor | None, *, transposed: bool
) -> None:
    """Raise ConfigError unless shapes and dtypes of the arguments of `grouped_linear` fit one another."""
    if x_RK.dim() != 2 or w.dim() != 3:
        raise ConfigError(
            f"x and w have {x_RK.dim()} and {w.dim()} dimensions; they must have 2 (R, K) and 3 (E, N, K); reshape them"
        )
    E, N, K = w.mT.shape if transposed else w.shape
    if x_RK.shape[1] != K:
        raise ConfigError(
            f"x has rows of {x_RK.shape[1]} and w takes {K}; they must be equal; check transposed={transposed}"
        )
    check_like("offsets", offsets_E, (E + 1,), torch.int32, fix="check the metadata")
    check_like("w", w, tuple(w.shape), x_RK.dtype)
    if b_EN is not None:
        check_like("bias", b_EN, (E, N), x_RK.dtype)


def _module(backend: str) -> Any:
    return triton_linear if backend == "triton" else loop


@torch.library.custom_op(
    "expertmesh::grouped_linear",
    mutates_args=(),
    schema="(Tensor x_RK, Tensor w, Tensor offsets_E, Tensor? b_EN, bool transposed, str backend) -> Tensor",
)
def _grouped_linear(x_RK: Tensor, *rest: Any) -> Tensor:
    *tensors, transposed, backend = rest
    with without_autocast(x_RK.device):
        y: Tensor = _module(backend).forward(x_RK, *tensors, transposed=transposed)
    return y


@_grouped_linear.register_fake
def _(x_RK: Tensor, w: Tensor, *rest: Any) -> Tensor:
    transposed = rest[-2]
    return x_RK.new_empty(x_RK.shape[0], w.shape[2] if transposed else w.shape[1])


@torch.library.custom_op(
    "expertmesh::grouped_linear_weight_grad",
    mutates_args=(),
    schema="(Tensor grad_RN, Tensor x_RK, Tensor w, Tensor offsets_E, bool transposed, str backend) -> Tensor",
)
def _weight_grad(grad_RN: Tensor, *rest: Any) -> Tensor:
    *tensors, transposed, backend = rest
    with without_autocast(grad_RN.device):
        found: Tensor = _module(backend).weight_grad(grad_RN, *tensors, transposed=transposed)
    return found


@_weight_grad.register_fake
def _(grad_RN: Tensor, x_RK: Tensor, w: Tensor, *_: Any) -> Tensor:
    return x_RK.new_empty(w.shape)


@torch.library.custom_op("expertmesh::grouped_linear_bias_grad", mutates_args=())
def _bias_grad(grad_RN: Tensor, offsets_E: Tensor, backend: str) -> Tensor:
    with without_autocast(grad_RN.device):
        found: Tensor = _module(backend).bias_grad(grad_RN, offsets_E)
    return found


@_bias_grad.register_fake
def _(grad_RN: Tensor, offsets_E: Tensor, backend: str) -> Tensor:
    return grad_RN.new_empty(offsets_E.shape[0] - 1, grad_RN.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RK, w, offsets_E, _, ctx.transposed, ctx.backend = inputs
    ctx.save_for_backward(x_RK if ctx.needs_input_grad[1] else None, w, offsets_E)


def _backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
    x_RK, w, offsets_E = ctx.saved_tensors
    grad_RN = grad_RN.contiguous()
    need_x, need_w, _, need_b = ctx.needs_input_grad[:4]
    flags = (ctx.transposed, ctx.backend)
    d_x = d_w = d_b = None
    if need_x:
        # the backward of x W^T is the same product with transposed matrices
        d_x = _grouped_linear(grad_RN, w, offsets_E, None, not ctx.transposed, ctx.backend)
    if need_w:
        d_w = _weight_grad(grad_RN, x_RK, w, offsets_E, *flags)
    if need_b:
        d_b = _bias_grad(grad_RN, offsets_E, ctx.backend)
    return d_x, d_w, None, d_b, None, None


_grouped_linear.register_autograd(_backward, setup_context=_setup_context)


for _operator in (_weight_grad, _bias_grad):
    refuse_second_derivative(_operator, "grouped_linear", fix="use a loop over the experts")
