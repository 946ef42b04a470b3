"""Triton backend of `moe_mlp`: the kernels in sequence. Kernels are imported in the first call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name
from expertmesh.ops.experts.weights import ExpertSlice, HiddenGradients, Needs
from expertmesh.ops.route_metadata import RouteMetadata


def forward(
    x_TD: Tensor,  # (T, D), float32, bfloat16 or float16
    experts: ExpertSlice,  # the weights; w_in may be interleaved, `stored.view(E, F, 2, D).transpose(1, 2)`
    weights_TK: Tensor,  # (T, K) routing weights
    maps: RouteMetadata,
    *,
    save_h: bool,  # whether to save H for `data_grads`, which recomputes it otherwise
    batch_invariant: bool = False,  # use tiles that do not depend on the number of rows
) -> tuple[Tensor, Tensor]:
    """Compute (y (T, D), H (R, G * F)); H has no rows unless save_h. Does not synchronise."""
    from expertmesh.kernels import combine, moe_forward

    call = _Call.of(x_TD, experts, weights_TK, maps, batch_invariant=batch_invariant)
    h, a = moe_forward.up(
        call.x_TD,
        call.w_in_EGFD,
        call.b_in_EGF,
        call.weights_TK,
        call.rows,
        call.config,
        inner=inner_name(experts.activation),
        store_h=save_h,
        store_a=True,
    )
    y_RD = moe_forward.rows_times_weights(
        a,
        call.w_out_EDF,
        call.rows,
        call.config,
        call.config.down,
        transposed=True,
        b_out_ED=call.b_out_ED,
        weights_TK=call.weights_TK,
    )
    y = combine.sum_rows(y_RD, maps.offsets_E[-1:], maps.row_of_slot_N, weights_TK.shape[1])
    return y, h


def data_grads(
    grad_TD: Tensor,  # (T, D) gradient of y, contiguous
    x_TD: Tensor,  # as given to `forward`
    h_RH: Tensor,  # H of `forward`; with fewer rows than R it is recomputed from x
    experts: ExpertSlice,  # as given to `forward`
    weights_TK: Tensor,  # as given to `forward`
    maps: RouteMetadata,  # as given to `forward`
    needs: Needs,  # the gradients to compute, including later ones by `weight_grads`
) -> tuple[Tensor | None, Tensor | None, HiddenGradients]:
    """Compute the gradients of x and of the routing weights, and the hidden rows for `weight_grads`.

    Returns:
        dx (T, D) or None, the routing weights' gradient (T, K) or None, and the gradients of the hidden rows. Bitwise
        deterministic; does not synchronise.
    """
    from expertmesh.kernels import combine, moe_backward, moe_forward, tiles

    call = _Call.of(x_TD, experts, weights_TK, maps)
    if h_RH.shape[0] != call.rows.num_rows:
        h_RH, _ = moe_forward.up(
            call.x_TD,
            call.w_in_EGFD,
            call.b_in_EGF,
            call.weights_TK,
            call.rows,
            call.config,
            inner=inner_name(experts.activation),
            store_h=True,
            store_a=False,
        )
    a, d_h, partial = moe_backward.hidden_grad(
        grad_TD,
        call.w_out_EDF,
        call.weights_TK,
        h_RH,
        call.rows,
        call.config,
        inner=inner_name(experts.activation),
        interleaved=tiles.is_interleaved(call.w_in_EGFD),
        need_a=needs.w_out,
        need_h=needs.x or needs.w_in or needs.b_in,
        need_weights=needs.weights,
    )
    d_x = d_weights = None
    if needs.x and d_h is not None:
        E, G, F, D = call.w_in_EGFD.shape
        d_x_RD = moe_forward.rows_times_weights(
            d_h,
            _in_memory_order(call.w_in_EGFD).view(E, G * F, D),
            call.rows,
            call.config,
            call.config.input_grad,
            transposed=False,
        )
        d_x = combine.sum_rows(d_x_RD, maps.offsets_E[-1:], maps.row_of_slot_N, weights_TK.shape[1])
    if partial is not None:
        d_weights = moe_backward.routing_weight_grad(
            partial, grad_TD, call.b_out_ED, call.weights_TK, call.rows, call.config
        )
    return d_x, d_weights, HiddenGradients(a, d_h)


def weight_grads(
    grad_TD: Tensor,  # as given to `data_grads`
    x_TD: Tensor,  # as given to `forward`
    hidden: HiddenGradients,  # from `data_grads`
    experts: ExpertSlice,  # as given to `forward`
    weights_TK: Tensor,  # as given to `forward`
    maps: RouteMetadata,  # as given to `forward`
    needs: Needs,  # the gradients to compute
    *,
    into: ExpertSlice | None = None,
) -> ExpertSlice:
    """Compute the gradients of the experts' weights and biases; experts without rows get zeros.

    Args:
        into: buffers to add to in place, of any floating-point dtype (FP32 main gradients), laid out in memory like the
            weights. None: new tensors of the weights' dtype.

    Returns:
        Gradients in the fields of the weights; unneeded w_in and w_out are empty, unneeded biases None. Bitwise
        deterministic; does not synchronise.
    """
    from expertmesh.kernels import moe_wgrad

    call = _Call.of(x_TD, experts, weights_TK, maps, cut=False)
    E, G, F, D = call.w_in_EGFD.shape
    rows, config, add = call.rows, call.config, into is not None
    w_in, w_out = x_TD.new_empty(0), x_TD.new_empty(0)  # outputs of one operator must not alias
    b_in = b_out = None
    if needs.w_out and hidden.a_RF is not None:
        w_out = into.w_out_EDF if into is not None else torch.empty_like(call.w_out_EDF)
        moe_wgrad.weight_grad(
            hidden.a_RF,
            grad_TD,
            rows,
            config,
            config.w_out_grad,
            gathered_rows=True,
            out=w_out,
            accumulate=add,
        )
    if needs.w_in and hidden.d_h_RH is not None:
        w_in = into.w_in_EGFD if into is not None else torch.empty_like(call.w_in_EGFD)
        moe_wgrad.weight_grad(
            hidden.d_h_RH,
            call.x_TD,
            rows,
            config,
            config.w_in_grad,
            gathered_rows=False,
            out=_in_memory_order(w_in).view(E, G * F, D),
            accumulate=add,
        )
    if needs.b_in and call.b_in_EGF is not None and hidden.d_h_RH is not None:
        given = into.b_in_EGF if into is not None else None
        b_in = torch.empty_like(call.b_in_EGF) if given is None else given
        ordered = _in_memory_order(b_in, like=call.b_in_EGF).view(E, G * F)
        moe_wgrad.bias_grad(hidden.d_h_RH, rows, out=ordered, gathered=False, accumulate=given is not None)
    if needs.b_out and call.b_out_ED is not None:
        given = into.b_out_ED if into is not None else None
        b_out = torch.empty_like(call.b_out_ED) if given is None else given
        moe_wgrad.bias_grad(
            grad_TD,
            rows,
            out=b_out,
            gathered=True,
            weights_TK=call.weights_TK,
            accumulate=given is not None,
        )
    return ExpertSlice(w_in, w_out, b_in, b_out, experts.activation)


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Tensor,
    experts: ExpertSlice,
    weights_TK: Tensor,
    maps: RouteMetadata,
    needs: Needs,
    *,
    into: ExpertSlice | None = None,
) -> tuple[Tensor | None, Tensor | None, ExpertSlice]:
    """Run `data_grads`, then `weight_grads`: the gradients of x, of the routing weights, and of the experts."""
    shared = (experts, weights_TK, maps, needs)
    d_x, d_weights, hidden = data_grads(grad_TD, x_TD, h_RH, *shared)
    return d_x, d_weights, weight_grads(grad_TD, x_TD, hidden, *shared, into=into)


@dataclass(frozen=True)
class _Call:
    """Arguments as the kernels take them: contiguous, or interleaved for w_in and b_in."""

    x_TD: Tensor
    w_in_EGFD: Tensor
    w_out_EDF: Tensor
    b_in_EGF: Tensor | None
    b_out_ED: Tensor | None
    weights_TK: Tensor
    rows: Any
    config: Any

    @staticmethod
    def of(
        x_TD: Tensor,
        experts: ExpertSlice,
        weights_TK: Tensor,
        maps: RouteMetadata,
        *,
        cut: bool = True,
        batch_invariant: bool = False,
    ) -> "_Call":
        from expertmesh.kernels import grouped, tiles

        w_in, b_in, b_out = experts.w_in_EGFD, experts.b_in_EGF, experts.b_out_ED
        E, G, F, D = w_in.shape
        interleaved = tiles.is_interleaved(w_in)
        if b_in is not None and interleaved:
            b_in = b_in.transpose(1, 2).contiguous().transpose(1, 2)
        elif b_in is not None:
            b_in = b_in.contiguous()
        config = tiles.choose_config(
            x_TD.device,
            x_TD.dtype,
            num_rows=maps.token_of_row_N.shape[0],
            num_experts=E,
            dim=D,
            hidden_dim=F,
            num_branches=G,
            batch_invariant=batch_invariant,
        )
        order = (maps.offsets_E, maps.token_of_row_N, maps.slot_of_row_N)
        w_in = w_in if interleaved else w_in.contiguous()
        w_out = experts.w_out_EDF.contiguous()
        config = tiles.described(config, w_in, w_out)
        return _Call(
            x_TD.contiguous(),
            w_in,
            w_out,
            b_in,
            None if b_out is None else b_out.contiguous(),
            weights_TK.contiguous(),
            grouped.Rows.cut(*order, config.block_m) if cut else grouped.Rows.uncut(*order),
            config,
        )


def _in_memory_order(w: Tensor, like: Tensor | None = None) -> Tensor:
    """View the memory as a contiguous tensor: (E, F, G, ...) if (E, G, F, ...) is interleaved."""
    return w if (w if like is None else like).is_contiguous() else w.transpose(1, 2)
