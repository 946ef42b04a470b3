"""The "torch" backend of `moe_mlp`: one GEMM per expert and step over its block of sorted rows.

Buffers are reused from expert to expert so that they stay in the cache. Nothing here is seen by autograd.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name, num_branches, pointwise, pointwise_backward
from expertmesh.ops.permute import sum_rows
from expertmesh.ops.reference import accumulate_dtype


@dataclass(frozen=True)
class Experts:
    """The weights of all experts and their activation, as `moe_mlp` takes them."""

    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    b_in_EGF: Tensor | None
    b_out_ED: Tensor | None
    activation: str


@dataclass(frozen=True)
class Maps:
    """The tensors of `RouteMetadata`."""

    offsets_E: Tensor
    token_of_row_N: Tensor
    slot_of_row_N: Tensor
    row_of_slot_N: Tensor


def forward(
    x_TD: Tensor, experts: Experts, weights_TK: Tensor, maps: Maps, *, save_h: bool
) -> tuple[Tensor, Tensor]:
    """Give (y (T, D), H (R, G * F)); H is empty unless save_h."""
    num_experts, G, F, D = experts.w_in_EGFD.shape
    num_rows = maps.token_of_row_N.shape[0]
    bounds = maps.offsets_E.tolist()
    h_all = x_TD.new_empty(num_rows if save_h else 0, G * F)
    y_RD = x_TD.new_empty(num_rows, D)
    weights_N = weights_TK.reshape(-1)
    for e in range(num_experts):
        span = slice(bounds[e], bounds[e + 1])
        if span.start == span.stop:
            continue
        x = x_TD.index_select(0, maps.token_of_row_N[span])
        h = torch.mm(x, experts.w_in_EGFD[e].view(G * F, D).T)
        if experts.b_in_EGF is not None:
            h += experts.b_in_EGF[e].view(G * F)
        if save_h:
            h_all[span] = h
        s = weights_N.index_select(0, maps.slot_of_row_N[span]).to(accumulate_dtype(x.dtype))[
            :, None
        ]
        a = _scaled_activation(h, s, experts.activation)
        y = torch.mm(a, experts.w_out_EDF[e].T)
        if experts.b_out_ED is not None:
            y += s * experts.b_out_ED[e]
        y_RD[span] = y
    return sum_rows(y_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1]), h_all


def _scaled_activation(h: Tensor, s: Tensor, activation: str) -> Tensor:
    inner = inner_name(activation)
    wide = h.to(s.dtype)
    if num_branches(activation) == 1:
        return (pointwise(wide, inner) * s).to(h.dtype)
    gate, up = wide.chunk(2, dim=1)
    return (pointwise(gate, inner) * up * s).to(h.dtype)


def _activation_backward(
    grad_rows: Tensor, h: Tensor, s: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """From dO W_out and H give (s * A, dH, rowsum(dA . A))."""
    inner = inner_name(activation)
    wide, grad = h.to(s.dtype), grad_rows.to(s.dtype)
    if num_branches(activation) == 1:
        a = pointwise(wide, inner)
        d_weight = (grad * a).sum(1)
        d_h = pointwise_backward(grad * s, wide, inner)
        return (a * s).to(h.dtype), d_h.to(h.dtype), d_weight
    gate, up = wide.chunk(2, dim=1)
    act = pointwise(gate, inner)
    a = act * up
    d_weight = (grad * a).sum(1)
    d_a = grad * s
    d_h = torch.cat([pointwise_backward(d_a * up, gate, inner), d_a * act], dim=1)
    return (a * s).to(h.dtype), d_h.to(h.dtype), d_weight


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for."""

    x: bool
    w_in: bool
    w_out: bool
    b_in: bool
    b_out: bool


@dataclass(frozen=True)
class Gradients:
    """The gradients of one call; those not needed are empty tensors."""

    x_TD: Tensor
    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    weights_TK: Tensor
    b_in_EGF: Tensor
    b_out_ED: Tensor


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    experts: Experts,
    weights_TK: Tensor,
    maps: Maps,
    needs: Needs,
) -> Gradients:
    """Give all gradients from the output's, X and H; nothing else was saved."""
    num_experts, G, F, D = experts.w_in_EGFD.shape
    num_rows = maps.token_of_row_N.shape[0]
    bounds = maps.offsets_E.tolist()
    d_w_in = _empty_like(experts.w_in_EGFD, needs.w_in, x_TD)
    d_w_out = _empty_like(experts.w_out_EDF, needs.w_out, x_TD)
    d_b_in = _empty_like(experts.b_in_EGF, needs.b_in, x_TD)
    d_b_out = _empty_like(experts.b_out_ED, needs.b_out, x_TD)
    d_x_RD = x_TD.new_empty(num_rows if needs.x else 0, D)
    weights_N = weights_TK.reshape(-1)
    d_weights_N = torch.zeros_like(weights_N)
    for e in range(num_experts):
        span = slice(bounds[e], bounds[e + 1])
        if span.start == span.stop:
            for grad in (d_w_in, d_w_out, d_b_in, d_b_out):
                if grad.numel():
                    grad[e].zero_()
            continue
        slots = maps.slot_of_row_N[span]
        tokens = maps.token_of_row_N[span]
        s = weights_N.index_select(0, slots).to(accumulate_dtype(x_TD.dtype))[:, None]
        grad = grad_TD.index_select(0, tokens)
        scaled_a, d_h, d_s = _activation_backward(
            torch.mm(grad, experts.w_out_EDF[e]), h_RH[span], s, experts.activation
        )
        if experts.b_out_ED is not None:
            d_s = d_s + torch.mv(grad, experts.b_out_ED[e])
        d_weights_N[slots] = d_s.to(weights_N.dtype)
        if needs.w_out:
            torch.mm(grad.T, scaled_a, out=d_w_out[e])
        if needs.w_in:
            x = x_TD.index_select(0, tokens)
            torch.mm(d_h.T, x, out=d_w_in[e].view(G * F, D))
        if d_b_in.numel():
            d_b_in[e] = d_h.sum(0, dtype=s.dtype).view(G, F)
        if d_b_out.numel():
            d_b_out[e] = (s * grad).sum(0)
        if needs.x:
            torch.mm(d_h, experts.w_in_EGFD[e].view(G * F, D), out=d_x_RD[span])
    d_x = x_TD.new_empty(0)
    if needs.x:
        d_x = sum_rows(d_x_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
    return Gradients(d_x, d_w_in, d_w_out, d_weights_N.view_as(weights_TK), d_b_in, d_b_out)


def _empty_like(tensor: Tensor | None, needed: bool, x_TD: Tensor) -> Tensor:
    # a fresh tensor even when empty: outputs of one operator may not be the same tensor
    return x_TD.new_empty(0) if tensor is None or not needed else tensor.new_empty(tensor.shape)
