"""Linear map of the router: FP32 accuracy for any dtype of the tokens, on tensor cores for BF16 tokens on a GPU."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.cpu.products import product
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.plain_call import runs_plainly

FEWEST_SPLIT_ROWS = 256
"""Fewest tokens for products in BF16 parts: from here on the kernels need not split the sum over D among programs."""


def router_linear(x_TD: Tensor, w_ED: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute x W^T in FP32 (FP64 for FP64 input), whatever the autocast state.

    The "triton" backend (see `resolve_backend`) multiplies 256 or more BF16 tokens by FP32 weights on tensor cores,
    with weights split into three BF16 parts. Its error against FP64 is within twice the FP32 product's. An infinite
    token gives NaN there. All other calls are an FP32 or FP64 product.

    Args:
        x_TD: (T, D), any float dtype; saved for the backward without an FP32 copy.
        w_ED: (E, D), any float dtype.

    Returns:
        (T, E) in FP32 or FP64. Differentiable, also twice (the second time by FP32 products). Does not synchronise.
    """
    if runs_plainly(x_TD, w_ED) and backend != "triton":
        return _linear(x_TD, w_ED)
    in_parts = (
        x_TD.dtype == torch.bfloat16
        and w_ED.dtype == torch.float32
        and resolve_backend(backend, x_TD.device, x_TD.dtype) == "triton"
        # last, because a compiler guards on this condition
        and x_TD.shape[0] >= FEWEST_SPLIT_ROWS
    )
    return (_split_linear if in_parts else _router_linear)(x_TD, w_ED)


def _linear(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    dtype = accumulate_dtype(x_TD.dtype)
    with without_autocast(x_TD.device):
        return product(x_TD.to(dtype), w_ED.to(dtype).t())


# A custom operator, not an autograd.Function: torch.compile would instantiate the latter, and torch warns about that.
_router_linear = torch.library.custom_op("expertmesh::router_linear", _linear, mutates_args=())


def _logits(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], w_ED.shape[0], dtype=accumulate_dtype(x_TD.dtype))


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _router_linear_backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and W; saved x is cast again, by differentiable operations."""
    x_TD, w_ED = ctx.saved_tensors
    with without_autocast(x_TD.device):
        dtype, (need_x, need_w) = grad_TE.dtype, ctx.needs_input_grad
        dx = product(grad_TE, w_ED.to(dtype)).to(x_TD.dtype) if need_x else None
        dw = product(grad_TE.t(), x_TD.to(dtype)).to(w_ED.dtype).contiguous() if need_w else None
    return dx, dw


_router_linear.register_fake(_logits)
_router_linear.register_autograd(_router_linear_backward, setup_context=_save_inputs)


@torch.library.custom_op("expertmesh::router_linear_split", mutates_args=())
def _split_linear(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    from expertmesh.kernels import split_product

    return split_product.logits(x_TD, w_ED)


def _split_backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    need_x, need_w = ctx.needs_input_grad
    dx, dw = _split_gradients(grad_TE, *ctx.saved_tensors, need_x, need_w)
    return (dx if need_x else None), (dw if need_w else None)


_split_linear.register_fake(_logits)
_split_linear.register_autograd(_split_backward, setup_context=_save_inputs)


@torch.library.custom_op("expertmesh::router_linear_split_grads", mutates_args=())
def _split_gradients(grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    from expertmesh.kernels import split_product

    return split_product.gradients(grad_TE, x_TD, w_ED, need_x=need_x, need_w=need_w)


@_split_gradients.register_fake
def _(grad_TE: Tensor, x_TD: Tensor, w_ED: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    dx = x_TD.new_empty(x_TD.shape if need_x else 0)
    return dx, w_ED.new_empty(w_ED.shape if need_w else 0)


def _save_for_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.needs = inputs[3:]


def _second_backward(
    ctx: Any, by_dx: Tensor, by_dw: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
    """Gradients of the products grad W and grad^T x by PyTorch's FP32 products, which are differentiable again."""
    grad_TE, x_TD, w_ED = ctx.saved_tensors
    need_x, need_w = ctx.needs
    d_grad = d_x = d_w = None
    with without_autocast(x_TD.device):
        if need_x:
            second_TD = by_dx.float()
            d_grad, d_w = product(second_TD, w_ED.t()), product(grad_TE.t(), second_TD)
        if need_w:
            by_x = product(x_TD.float(), by_dw.t())
            d_grad = by_x if d_grad is None else d_grad + by_x
            d_x = product(grad_TE, by_dw).to(x_TD.dtype)
    return d_grad, d_x, d_w, None, None


_split_gradients.register_autograd(_second_backward, setup_context=_save_for_second)
