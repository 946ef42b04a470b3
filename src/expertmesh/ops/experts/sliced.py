"""`moe_mlp` as `torch.library` operators, for weights in slices along F and for main gradients.

Lists of tensors cost the host some tenths of a millisecond per call, so weights in one piece have an operator of their
own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.expert_types import Experts, SliceNeeds
from expertmesh.ops.experts.operator import double_backward, fake_grad, fake_h, fake_w_in_grad
from expertmesh.ops.experts.slices import ExpertsCall, make_slices
from expertmesh.ops.route_metadata import RouteMetadata


def moe_mlp(call: ExpertsCall, main: Sequence[Experts] | None, *, save_h: bool) -> Tensor:
    """Run the operator; with `main` the weights' gradients are added to these buffers in the backward."""
    m, b_out = call.maps, call.slices[0].b_out_ED
    outputs = _moe_mlp(
        call.x_TD,
        [experts.w_in_EGFD for experts in call.slices],
        [experts.w_out_EDF for experts in call.slices],
        call.weights_TK,
        [experts.b_in_EGF for experts in call.slices if experts.b_in_EGF is not None],
        b_out,
        [] if main is None else _flat(main),
        m.offsets_E,
        m.token_of_row_N,
        m.slot_of_row_N,
        m.row_of_slot_N,
        call.slices[0].activation,
        save_h,
        call.backend,
    )
    return outputs[0]


def _flat(slices: Sequence[Experts]) -> list[Tensor]:
    """Tensors of the slices as a list: w_in of all, w_out of all, b_in of all, b_out."""
    several = [s.w_in_EGFD for s in slices] + [s.w_out_EDF for s in slices]
    b_in = [s.b_in_EGF for s in slices if s.b_in_EGF is not None]
    return several + b_in + ([] if slices[0].b_out_ED is None else [slices[0].b_out_ED])


def _unflat(tensors: Sequence[Tensor], like: Sequence[Experts]) -> tuple[Experts, ...]:
    """The slices that `_flat` made a list of."""
    S = len(like)
    w_in, w_out, rest = tensors[:S], tensors[S : 2 * S], tensors[2 * S :]
    b_in = rest[:S] if like[0].b_in_EGF is not None else []
    b_out = None if like[0].b_out_ED is None else rest[-1]
    return make_slices(w_in, w_out, b_in, b_out, like[0].activation)


@torch.library.custom_op("expertmesh::moe_mlp_sliced", mutates_args=())
def _moe_mlp(
    x_TD: Tensor,
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    main: list[Tensor],
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    save_h: bool,
    backend: str,
) -> list[Tensor]:
    slices = make_slices(w_in, w_out, b_in, b_out_ED, activation)
    maps = RouteMetadata(offsets_E, token_of_row_N, slot_of_row_N, row_of_slot_N)
    with without_autocast(x_TD.device):
        call = ExpertsCall(x_TD, slices, weights_TK, maps, backend)
        y_TD, hidden = call.forward(save_h=save_h)
    return [y_TD, *hidden]


@_moe_mlp.register_fake
def _(
    x_TD: Tensor,
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    main: list[Tensor],
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    activation: str,
    save_h: bool,
    backend: str,
) -> list[Tensor]:
    hidden = [fake_h(x_TD, w, token_of_row_N, save_h) for w in w_in]
    return [x_TD.new_empty(x_TD.shape), *hidden]


def _call_of(
    x_TD: Tensor,
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    maps: list[Tensor],
    activation: str,
    backend: str,
) -> ExpertsCall:
    slices = make_slices(w_in, w_out, b_in, b_out_ED, activation)
    return ExpertsCall(x_TD, slices, weights_TK, RouteMetadata(*maps), backend)


def _needs_of(needs: list[bool], num_slices: int) -> SliceNeeds:
    """From x, weights, b_out, then w_in, w_out and b_in (if any) of all slices."""
    x, weights, b_out, *rest = needs
    S = num_slices
    return SliceNeeds(
        x, weights, b_out, tuple(rest[:S]), tuple(rest[S : 2 * S]), tuple(rest[2 * S :])
    )


@torch.library.custom_op("expertmesh::moe_mlp_sliced_backward", mutates_args=())
def _moe_mlp_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: list[Tensor],
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    maps: list[Tensor],
    activation: str,
    needs: list[bool],
    backend: str,
) -> list[Tensor]:
    """Gradients in the order of `_needs_of`; those not wanted are empty."""
    wanted = _needs_of(needs, len(w_in))
    with without_autocast(x_TD.device):
        call = _call_of(x_TD, w_in, w_out, weights_TK, b_in, b_out_ED, maps, activation, backend)
        d_x, d_weights, grads = call.backward(grad_TD.contiguous(), hidden, wanted)

    def given(grad: Tensor | None) -> Tensor:
        return x_TD.new_empty(0) if grad is None else grad

    biases = [given(g.b_in_EGF).contiguous() for g in grads] if b_in else []
    first = [given(d_x), given(d_weights), given(grads[0].b_out_ED)]
    return first + [g.w_in_EGFD for g in grads] + [g.w_out_EDF for g in grads] + biases


@_moe_mlp_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: list[Tensor],
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    maps: list[Tensor],
    activation: str,
    needs: list[bool],
    backend: str,
) -> list[Tensor]:
    wanted = _needs_of(needs, len(w_in))
    first = [
        fake_grad(x_TD, x_TD, wanted.x),
        fake_grad(x_TD, weights_TK, wanted.weights),
        fake_grad(x_TD, b_out_ED, wanted.b_out),
    ]
    pairs = zip(w_in, wanted.w_in, strict=True)
    d_w_in = [fake_w_in_grad(x_TD, w, needed, backend) for w, needed in pairs]
    d_w_out = [fake_grad(x_TD, w, n) for w, n in zip(w_out, wanted.w_out, strict=True)]
    return (
        first
        + d_w_in
        + d_w_out
        + [fake_grad(x_TD, b, n) for b, n in zip(b_in, wanted.b_in, strict=True)]
    )


@torch.library.custom_op("expertmesh::moe_mlp_backward_into", mutates_args=("main",))
def _moe_mlp_backward_into(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: list[Tensor],
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    maps: list[Tensor],
    activation: str,
    needs: list[bool],
    backend: str,
    main: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the routing weights; those of the experts are added to `main`."""
    wanted = _needs_of(needs, len(w_in))
    with without_autocast(x_TD.device):
        call = _call_of(x_TD, w_in, w_out, weights_TK, b_in, b_out_ED, maps, activation, backend)
        into = _unflat(main, call.slices)
        d_x, d_weights, _ = call.backward(grad_TD.contiguous(), hidden, wanted, into=into)
    return (
        x_TD.new_empty(0) if d_x is None else d_x,
        x_TD.new_empty(0) if d_weights is None else d_weights,
    )


@_moe_mlp_backward_into.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: list[Tensor],
    w_in: list[Tensor],
    w_out: list[Tensor],
    weights_TK: Tensor,
    b_in: list[Tensor],
    b_out_ED: Tensor | None,
    maps: list[Tensor],
    activation: str,
    needs: list[bool],
    backend: str,
    main: list[Tensor],
) -> tuple[Tensor, Tensor]:
    return fake_grad(x_TD, x_TD, needs[0]), fake_grad(x_TD, weights_TK, needs[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, w_in, w_out, weights, b_in, b_out, main, *maps, activation, _, backend = inputs
    ctx.save_for_backward(x, weights, b_out, *maps, *output[1:], *w_in, *w_out, *b_in)
    # not saved: micro-batches change them between this forward and its backward, which is what they are for
    ctx.main = list(main)
    ctx.num_slices, ctx.activation, ctx.backend = len(w_in), activation, backend
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    S = ctx.num_slices
    saved = ctx.saved_tensors  # read once: activation checkpointing lets nobody read them again
    x, weights, b_out, *maps = saved[:7]
    tensors = list(saved[7:])
    hidden, w_in, w_out, b_in = (
        tensors[:S],
        tensors[S : 2 * S],
        tensors[2 * S : 3 * S],
        tensors[3 * S :],
    )
    need_x, need_w_in, need_w_out, need_weights, need_b_in, need_b_out, *_ = ctx.needs_input_grad
    needs = [need_x, need_weights, need_b_out, *need_w_in, *need_w_out, *need_b_in]
    found: list[Tensor | None] = [None] * len(needs)
    if grads[0] is not None:
        arguments = (
            grads[0], x, hidden, w_in, w_out, weights, b_in, b_out, maps, ctx.activation, needs, ctx.backend,
        )  # fmt: skip
        if ctx.main:
            found[:2] = _moe_mlp_backward_into(*arguments, ctx.main)
            wanted = [*needs[:2]] + [False] * (len(needs) - 2)
        else:
            found, wanted = list(_moe_mlp_backward(*arguments)), needs
        found = [g if needed else None for g, needed in zip(found, wanted, strict=True)]
    d_x, d_weights, d_b_out, *rest = found
    d_w_in, d_w_out, d_b_in = rest[:S], rest[S : 2 * S], rest[2 * S :]
    none = (None,) * 7
    return d_x, d_w_in, d_w_out, d_weights, d_b_in, d_b_out, [None] * len(ctx.main), *none


_moe_mlp.register_autograd(_backward, setup_context=_setup_context)
_moe_mlp_backward.register_autograd(double_backward)
