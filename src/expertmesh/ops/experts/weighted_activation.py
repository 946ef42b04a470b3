"""Activation of pre-activation rows, multiplied by their routing weights, as one autograd operator.

For experts whose products are separate operators. Without an output bias the routing weight may be applied on either
side of the second product; here it needs no pass of its own.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.activation import activate, inner_name, num_branches
from expertmesh.ops.backend import uses_triton
from expertmesh.ops.cpu.activation_passes import BLOCK_ELEMENTS, passes_for
from expertmesh.ops.dtypes import accumulate_dtype, without_autocast
from expertmesh.ops.transforms import refuse_second_derivative, refuse_transforms


def weighted_activation(h_RH: Tensor, s_R: Tensor, *, activation: str, backend: str = "auto") -> Tensor:
    """Compute s * act(h) in FP32 (FP64 for FP64), rounded once.

    On a CPU, and with Triton, it is one operator, for which autograd saves h and s only; elsewhere it is several.

    Args:
        h_RH: (R, G * F) pre-activations; for a gated activation the gates come first.
        s_R: (R,) routing weights of any floating-point dtype.
        backend: see `resolve_backend`.

    Returns:
        (R, F) in the dtype of h.
    """
    refuse_transforms("weighted_activation", lambda: [h_RH, s_R])
    G, wide = num_branches(activation), accumulate_dtype(h_RH.dtype)
    by_triton = uses_triton(backend, h_RH.device, h_RH.dtype)
    if by_triton or h_RH.device.type == "cpu":
        a_RF: Tensor = _weighted_activation(h_RH, s_R.to(wide), activation, by_triton)
        return a_RF
    a_RF = activate(h_RH.to(wide).unflatten(1, (G, -1)), activation) * s_R[:, None]
    return a_RF.to(h_RH.dtype)


@torch.library.custom_op("expertmesh::weighted_activation", mutates_args=())
def _weighted_activation(h_RH: Tensor, s_R: Tensor, activation: str, by_triton: bool) -> Tensor:
    if by_triton:
        from expertmesh.kernels import activated_rows as kernels

        return kernels.forward(h_RH.contiguous(), s_R.contiguous(), **_words(activation))
    a_RF = h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // num_branches(activation))
    with without_autocast(h_RH.device):
        passes = passes_for(activation, a_RF, num_rows=a_RF.shape[0], backward=False)
        passes.forward(h_RH.contiguous(), s_R.contiguous(), a_RF)
    return a_RF


def _words(activation: str) -> dict[str, Any]:
    return {"num_branches": num_branches(activation), "inner": inner_name(activation)}


@_weighted_activation.register_fake
def _(h_RH: Tensor, s_R: Tensor, activation: str, by_triton: bool) -> Tensor:
    return h_RH.new_empty(h_RH.shape[0], h_RH.shape[1] // num_branches(activation))


@torch.library.custom_op("expertmesh::weighted_activation_backward", mutates_args=())
def _gradients(grad_RF: Tensor, h_RH: Tensor, s_R: Tensor, activation: str, by_triton: bool) -> tuple[Tensor, Tensor]:
    h_RH, s_R = h_RH.contiguous(), s_R.contiguous()
    if by_triton:
        from expertmesh.kernels import activated_rows as kernels

        return kernels.backward(grad_RF.contiguous(), h_RH, s_R, **_words(activation))
    num_rows, F = grad_RF.shape
    d_h, d_s = torch.empty_like(h_RH), torch.empty_like(s_R)
    # the passes overwrite the gradient and also compute s * act(h): both stay in the cache
    rows = max(1, min(num_rows, BLOCK_ELEMENTS * torch.get_num_threads() // max(F, 1)))
    grad_buffer, a_buffer = (h_RH.new_empty(rows, F) for _ in range(2))
    with without_autocast(h_RH.device):
        passes = passes_for(activation, a_buffer, num_rows=num_rows, backward=True)
        for start in range(0, num_rows, rows):
            at = slice(start, start + rows)
            h, s = h_RH[at], s_R[at]
            grad = grad_buffer[: len(s)].copy_(grad_RF[at])
            d_s[at] = passes.backward(grad, h, None, s, a_buffer[: len(s)], d_h[at])
    return d_h, d_s


@_gradients.register_fake
def _(grad_RF: Tensor, h_RH: Tensor, s_R: Tensor, activation: str, by_triton: bool) -> tuple[Tensor, Tensor]:
    return h_RH.new_empty(h_RH.shape), s_R.new_empty(s_R.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h_RH, s_R, *ctx.how = inputs
    ctx.save_for_backward(h_RH, s_R)


def _backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(grad_RF, *ctx.saved_tensors, *ctx.how), None, None


_weighted_activation.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivative(_gradients, "weighted_activation", fix="use torch's own operators")
