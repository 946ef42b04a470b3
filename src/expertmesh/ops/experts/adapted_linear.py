"""Products of sorted rows with their experts' matrices and low-rank adapters, as one autograd operator.

The matrices are frozen: they get no gradient here.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.check import check_like
from expertmesh.ops.cpu import adapted_linear as loop
from expertmesh.ops.dtypes import autocast_dtype, gemm_dtype, without_autocast
from expertmesh.ops.experts.grouped_linear import check_rows_and_matrices, grouped_linear
from expertmesh.ops.transforms import refuse_second_derivative, refuse_transforms


def adapted_linear(
    x_RK: Tensor,  # (R, K) rows sorted by expert
    w: Tensor,  # (E, N, K), or (E, K, N) with `transposed`
    offsets_E: Tensor,  # (E + 1,) int32, `RouteMetadata.offsets_E`
    a_ErK: Tensor,  # (E, r, K), A of each expert; may be a view
    b_ENr: Tensor,  # (E, N, r), B of each expert; may be a view
    scaling: float,  # s
    *,
    bias_EN: Tensor | None = None,  # (E, N), or None
    transposed: bool = False,  # whether the matrices are stored as (K, N)
    backend: str = "auto",  # see `grouped_linear`
) -> Tensor:
    """Multiply every row by its expert's matrix and adapter: y = x W^T + s (x A^T) B^T + bias (Hu et al. 2021, section
    4.1).

    Neither W + s B A nor a gradient of its size is materialised, unless w requires a gradient. On a CPU with product
    instructions for the dtype, with frozen weights and without bias, it is one operator; otherwise three
    `grouped_linear`.

    Returns:
        (R, N) in the type of x, or autocast's.
    """
    refuse_transforms("adapted_linear", lambda: [x_RK, w, a_ErK, b_ENr, bias_EN])
    dtype = x_RK.dtype
    serves = (
        x_RK.device.type == "cpu"
        and resolve_backend(backend, x_RK.device, dtype) != "triton"
        and dtype == w.dtype == a_ErK.dtype == b_ENr.dtype == gemm_dtype(x_RK.device, dtype)
        and autocast_dtype(x_RK.device) is None
        and bias_EN is None
        and not w.requires_grad
    )
    if serves:
        w_ENK = w.mT if transposed else w
        check_rows_and_matrices(x_RK, w, offsets_E, None, transposed=transposed)
        check_rows_and_matrices(x_RK, a_ErK, offsets_E, None, transposed=False)
        expected = (*w_ENK.shape[:2], a_ErK.shape[1])
        check_like("b", b_ENr, expected, fix="check the adapters")
        y: Tensor = _adapted_linear(x_RK, w_ENK, offsets_E, a_ErK, b_ENr, scaling)[0]
        return y
    y = grouped_linear(x_RK, w, offsets_E, b_EN=bias_EN, transposed=transposed, backend=backend)
    return y + low_rank(x_RK, offsets_E, a_ErK, b_ENr, scaling, backend=backend)


def low_rank(
    x_RK: Tensor,
    offsets_E: Tensor,
    a_ErK: Tensor,
    b_ENr: Tensor,
    scaling: float,
    *,
    backend: str = "auto",
) -> Tensor:
    """Multiply every row by its expert's adapter alone: s (x A^T) B^T."""
    low_Rr = grouped_linear(x_RK, a_ErK, offsets_E, backend=backend) * scaling
    return grouped_linear(low_Rr, b_ENr, offsets_E, backend=backend)


_CALL = "Tensor w_ENK, Tensor offsets_E, Tensor a_ErK, Tensor b_ENr, float scaling"


@torch.library.custom_op(
    "expertmesh::adapted_linear",
    mutates_args=(),
    schema=f"(Tensor x_RK, {_CALL}) -> (Tensor, Tensor)",
)
def _adapted_linear(x_RK: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    with without_autocast(x_RK.device):
        return loop.forward(x_RK.contiguous(), *call)


@_adapted_linear.register_fake
def _(x_RK: Tensor, w_ENK: Tensor, _: Tensor, a_ErK: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    rows = x_RK.shape[0]
    return x_RK.new_empty(rows, w_ENK.shape[1]), x_RK.new_empty(rows, a_ErK.shape[1])


@torch.library.custom_op(
    "expertmesh::adapted_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad_RN, Tensor x_RK, Tensor low_Rr, {_CALL}, bool needs_x) -> (Tensor, Tensor, Tensor)",
)
def _gradients(grad_RN: Tensor, x_RK: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    with without_autocast(x_RK.device):
        return loop.backward(grad_RN.contiguous(), x_RK.contiguous(), *call)


@_gradients.register_fake
def _(grad_RN: Tensor, x_RK: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor]:
    a_ErK, b_ENr = call[3:5]
    d_x = x_RK.new_empty(x_RK.shape if call[-1] else 0)
    return d_x, a_ErK.new_empty(a_ErK.shape), b_ENr.new_empty(b_ENr.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_RK, *call, ctx.scaling = inputs
    ctx.save_for_backward(x_RK, output[1], *call)


def _backward(ctx: Any, grad_RN: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs_x = ctx.needs_input_grad[0]
    d_x, d_a, d_b = _gradients(grad_RN, *ctx.saved_tensors, ctx.scaling, needs_x)
    return d_x if needs_x else None, None, None, d_a, d_b, None


_adapted_linear.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivative(_gradients, "adapted_linear", fix="use a loop over the experts")
