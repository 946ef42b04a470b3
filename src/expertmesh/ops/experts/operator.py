"""`moe_mlp` as `torch.library` operators, for weights in one piece: what autograd and torch.compile see."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.expert_types import Experts, SliceNeeds
from expertmesh.ops.experts.slices import ExpertsCall
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.route_metadata import RouteMetadata


def moe_mlp(call: ExpertsCall, *, save_h: bool) -> Tensor:
    """Run the operator for a call of one slice; without save_h autograd saves x only."""
    (experts,), m = call.slices, call.maps
    weights = (experts.w_in_EGFD, experts.w_out_EDF, experts.b_in_EGF, experts.b_out_ED)
    if runs_plainly(call.x_TD, call.weights_TK, *weights):
        with without_autocast(call.x_TD.device):
            return call.forward(save_h=False)[0]
    return _moe_mlp(
        call.x_TD,
        experts.w_in_EGFD,
        experts.w_out_EDF,
        call.weights_TK,
        experts.b_in_EGF,
        experts.b_out_ED,
        m.offsets_E,
        m.token_of_row_N,
        m.slot_of_row_N,
        m.row_of_slot_N,
        experts.activation,
        save_h,
        call.backend,
    )[0]


@torch.library.custom_op("expertmesh::moe_mlp", mutates_args=())
def _moe_mlp(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    save_h: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    experts = Experts(w_in_EGFD, w_out_EDF, b_in_EGF, b_out_ED, activation)
    maps = RouteMetadata(offsets_E, token_of_row_N, slot_of_row_N, row_of_slot_N)
    with without_autocast(x_TD.device):
        call = ExpertsCall(x_TD, (experts,), weights_TK, maps, backend)
        y_TD, (h_RH,) = call.forward(save_h=save_h)
    return y_TD, h_RH


@_moe_mlp.register_fake
def _(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    save_h: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), fake_h(x_TD, w_in_EGFD, token_of_row_N, save_h)


@torch.library.custom_op("expertmesh::moe_mlp_backward", mutates_args=())
def _moe_mlp_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    experts = Experts(w_in_EGFD, w_out_EDF, b_in_EGF, b_out_ED, activation)
    maps = RouteMetadata(offsets_E, token_of_row_N, slot_of_row_N, row_of_slot_N)
    need_x, need_w_in, need_w_out, need_weights, need_b_in, need_b_out = needs
    wanted = SliceNeeds(need_x, need_weights, need_b_out, (need_w_in,), (need_w_out,), (need_b_in,))
    with without_autocast(x_TD.device):
        call = ExpertsCall(x_TD, (experts,), weights_TK, maps, backend)
        d_x, d_weights, (grads,) = call.backward(grad_TD.contiguous(), [h_RH], wanted)

    def given(grad: Tensor | None) -> Tensor:
        # a fresh tensor even when empty: outputs of one operator may not be the same tensor
        return x_TD.new_empty(0) if grad is None else grad

    return (
        given(d_x),
        grads.w_in_EGFD,
        grads.w_out_EDF,
        given(d_weights),
        given(grads.b_in_EGF).contiguous(),
        given(grads.b_out_ED),
    )


@_moe_mlp_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    weights_TK: Tensor,
    b_in_EGF: Tensor | None,
    b_out_ED: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    need_x, need_w_in, need_w_out, need_weights, need_b_in, need_b_out = needs
    return (
        fake_grad(x_TD, x_TD, need_x),
        fake_w_in_grad(x_TD, w_in_EGFD, need_w_in, backend),
        fake_grad(x_TD, w_out_EDF, need_w_out),
        fake_grad(x_TD, weights_TK, need_weights),
        fake_grad(x_TD, b_in_EGF, need_b_in),
        fake_grad(x_TD, b_out_ED, need_b_out),
    )


def fake_h(x_TD: Tensor, w_in_EGFD: Tensor, token_of_row_N: Tensor, save_h: bool) -> Tensor:
    """H as the forward returns it, without its values."""
    num_rows = token_of_row_N.shape[0] if save_h else 0
    return x_TD.new_empty(num_rows, w_in_EGFD.shape[1] * w_in_EGFD.shape[2])


def fake_grad(x_TD: Tensor, tensor: Tensor | None, needed: bool) -> Tensor:
    """A gradient without its values: contiguous, and empty where it is not wanted."""
    if tensor is None or not needed:
        return x_TD.new_empty(0)
    return tensor.new_empty(tensor.shape)


def fake_w_in_grad(x_TD: Tensor, w_in_EGFD: Tensor, needed: bool, backend: str) -> Tensor:
    """The same for w_in, whose gradient from Triton is interleaved like the weight."""
    if needed and backend == "triton":
        from expertmesh.kernels.tiles import is_interleaved

        if is_interleaved(w_in_EGFD):
            return torch.empty_like(w_in_EGFD)
    return fake_grad(x_TD, w_in_EGFD, needed)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_in, w_out, weights, b_in, b_out, *maps, activation, _, backend = inputs
    ctx.save_for_backward(x, output[1], w_in, w_out, weights, b_in, b_out, *maps)
    ctx.activation, ctx.backend = activation, backend
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_TD: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:6])
    rest = (None,) * 7
    if grad_TD is None:
        return (None,) * 6 + rest
    grads = _moe_mlp_backward(grad_TD, *ctx.saved_tensors, ctx.activation, needs, ctx.backend)
    return tuple(g if needed else None for g, needed in zip(grads, needs, strict=True)) + rest


def double_backward(ctx: Any, *grads: Any) -> None:
    """Refuse the second derivative.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "moe_mlp has no second derivative; use backend='reference' where one is needed (gradient penalties)"
    )


_moe_mlp.register_autograd(_backward, setup_context=_setup_context)
_moe_mlp_backward.register_autograd(double_backward)
