"""Products of sorted rows with their experts' quantised matrices, as one autograd operator; differentiable for the
rows.

An expert's matrix is widened when its rows are multiplied, and again in the backward, so that at most one wide matrix
exists. Rounding, type and order of sums are as in `grouped_linear` with the widened matrices. On a GPU
`quantized_triton.linear` multiplies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.backend import uses_triton
from expertmesh.ops.cpu.expert_rows import rows_by_expert
from expertmesh.ops.cpu.products import linear_into, product_into
from expertmesh.ops.dtypes import gemm_dtype, without_autocast
from expertmesh.ops.experts import quantized_triton
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.transforms import refuse_transforms


def frozen_linear(
    x_RK: Tensor, experts: ExpertSlice, offsets_E: Tensor, *, is_in: bool, b_EN: Tensor | None, backend: str = "auto"
) -> Tensor:
    """Multiply rows sorted by expert by quantised w_in or w_out: y_r = x_r W[e]^T + b[e], (R, N) in the dtype of x."""
    refuse_transforms("frozen_linear", lambda: [x_RK])
    given = (experts.w_in_EGFD, experts.w_out_EDF, experts.scales_in, experts.scales_out)
    stored = [tensor for tensor in given if tensor is not None]
    name = "triton" if uses_triton(backend, x_RK.device, x_RK.dtype) else "torch"
    call = (x_RK, stored, offsets_E, b_EN, experts.format, name, is_in, False)
    y: Tensor = _product(*call) if runs_plainly(x_RK) else _frozen_linear(*call)
    return y


def _matrices(stored: Sequence[Tensor], format: str, is_in: bool) -> tuple[ExpertSlice, int, int]:
    """The experts, N and K."""
    w_in, w_out, *scales = stored
    one = ExpertSlice(w_in, w_out, None, None, "", format, *scales)
    _, G, F, D = one.shape
    return one, *((G * F, D) if is_in else (D, F))


def _product(x_RK: Tensor, stored: Sequence[Tensor], offsets_E: Tensor, *call: Any) -> Tensor:
    b_EN, format, backend, is_in, transposed = call
    one, N, K = _matrices(stored, format, is_in)
    if backend == "triton":
        return quantized_triton.linear(x_RK, one, offsets_E, b_EN, is_in=is_in, transposed=transposed)
    bounds, dtype = offsets_E.tolist(), gemm_dtype(x_RK.device, x_RK.dtype)
    x, y = x_RK.to(dtype), x_RK.new_empty(len(x_RK), K if transposed else N, dtype=dtype)
    for block in rows_by_expert(bounds, x.new_empty(1).expand(1, N, K), dtype):
        x_e, y_e = block.each(x), block.room(y)
        w = (one.w_in if is_in else one.w_out)(block.expert, dtype, x_RK.dtype)
        if transposed:
            product_into(x_e, w, y_e)
        elif b_EN is not None:
            linear_into(x_e, w, y_e, bias_N=b_EN[block.expert].to(dtype))
        else:
            product_into(x_e, w.T, y_e)
        block.keep(y_e, y)
    y[bounds[-1] :].zero_()
    return y.to(x_RK.dtype)


@torch.library.custom_op(
    "expertmesh::frozen_linear",
    mutates_args=(),
    schema="(Tensor x_RK, Tensor[] stored, Tensor offsets_E, Tensor? b_EN, str format, str backend, bool is_in, bool "
    "transposed) -> Tensor",
)
def _frozen_linear(x_RK: Tensor, *call: Any) -> Tensor:
    with without_autocast(x_RK.device):
        return _product(x_RK.contiguous(), *call)


@_frozen_linear.register_fake
def _(x_RK: Tensor, stored: Sequence[Tensor], *call: Any) -> Tensor:
    *_, format, _, is_in, transposed = call
    _, *sizes = _matrices(stored, format, is_in)
    return x_RK.new_empty(len(x_RK), sizes[transposed])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, stored, offsets_E, _, ctx.format, ctx.backend, ctx.is_in, _ = inputs
    ctx.save_for_backward(offsets_E, *stored)


def _backward(ctx: Any, grad_RN: Tensor) -> tuple[Any, ...]:
    offsets_E, *stored = ctx.saved_tensors
    d_x = _frozen_linear(grad_RN, stored, offsets_E, None, ctx.format, ctx.backend, ctx.is_in, True)
    return d_x, [None] * len(stored), *[None] * 6


_frozen_linear.register_autograd(_backward, setup_context=_setup_context)
