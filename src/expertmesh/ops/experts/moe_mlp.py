"""Experts of a mixture-of-experts layer as one autograd operator."""

import torch
from torch import Tensor

from expertmesh.ops.experts import operator
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.checked_arguments import checked, main_buffers
from expertmesh.ops.experts.deferred_wgrad import DeferredWeightGradients
from expertmesh.ops.experts.weights import ExpertWeights, WeightGradients, Weights
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata


def moe_mlp(
    x_TD: Tensor,
    w_in_EGFD: Weights,
    w_out_EDF: Weights,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    *,
    activation: str,
    b_in_EGF: Weights | None = None,
    b_out_ED: Tensor | None = None,
    recompute_h: bool = False,
    main_grads: WeightGradients | None = None,
    backend: str = "auto",
    late: DeferredWeightGradients | None = None,
) -> Tensor:
    """Run every token through its experts and sum the weighted results.

    y_t = sum_j (s_tj * act(x_t W_in[e]^T + b_in[e])) W_out[e]^T + s_tj * b_out[e], with e the j-th expert of token t
    and s its routing weight. The weight is applied by the experts, so combine is a plain sum and the gradient of the
    weight is rowsum(dA . A). Autograd saves only X, the pre-activations H (G * F wide) and the metadata. Gradients are
    bitwise deterministic. The second derivative is an error (the "reference" backend has it). Sums are FP32 (FP64 for
    FP64 input), including the combine.

    Args:
        x_TD: (T, D) tokens, float64, float32, bfloat16 or float16. Under autocast x, weights and biases of the
            experts are cast to its type here.
        w_in_EGFD: (E, G, F, D) first weights, G = 2 (gate, up) for gated activations and 1 for plain ones; or a list of
            slices along F, (E, G, F_i, D) each, which are not copied. The result equals their concatenation's up to
            rounding, and every slice gets its gradient. Each slice costs one more gather of x and one more sum over the
            rows.
        w_out_EDF: (E, D, F) second weights; a list of (E, D, F_i) if w_in is a list.
        weights_TK: (T, K) routing weights of any floating-point dtype (FP32 from routers).
        metadata: from `route_metadata`.
        activation: swiglu, geglu, reglu, gelu (erf), relu, relu2, silu or clamped_swiglu (gpt-oss).
        b_in_EGF: (E, G, F) or None; a list of (E, G, F_i) if w_in is a list.
        b_out_ED: (E, D) or None.
        recompute_h: save X only and recompute H in the backward: two thirds of the forward's FLOPs more (half, if not
            gated), G * N * F elements less, bitwise the same results. The "reference" backend saves what autograd
            saves.
        main_grads: FP32 buffers (FP64 for FP64), one for each weight and bias, for accumulation over micro-batches. The
            backward adds the weights' gradients to them in place, without rounding to a narrower dtype. The weights
            then get no gradient from autograd (`.grad` stays None). The buffer of a weight that needs no gradient is
            not changed. Must not be combined with anything that runs a backward twice or reads weights' gradients from
            autograd (`torch.autograd.grad`, hooks, gradient scaling of `.grad`).
        backend: see `resolve_backend`. FP64 runs on PyTorch's GEMMs under "auto", and "triton" refuses it.
        late: defers the weights' gradients: it computes them on request after the tokens' backward, bitwise the same,
            and not seen by autograd. All weights must require gradients. Not for `torch.compile`.

    Returns:
        y (T, D) in the dtype of x (autocast's under autocast).

    Raises:
        ConfigError: shapes or types do not fit one another.

    Example:
        >>> x_TD, weights_TK = torch.randn(5, 8), torch.full((5, 2), 0.5)
        >>> maps = route_metadata(torch.randint(0, 4, (5, 2)), 4)
        >>> y_TD = moe_mlp(x_TD, torch.randn(4, 2, 16, 8), torch.randn(4, 8, 16), weights_TK, maps, activation="swiglu")
        >>> y_TD.shape
        torch.Size([5, 8])
    """
    experts = ExpertWeights.of(w_in_EGFD, w_out_EDF, activation, b_in=b_in_EGF, b_out=b_out_ED)
    return compute_rows(
        ExpertsCall(x_TD, weights_TK, experts, backend),
        metadata,
        recompute_h=recompute_h,
        main_grads=main_grads,
        late=late,
    )


def compute(
    call: ExpertsCall,
    *,
    max_rows: int | None = None,
    recompute_h: bool = False,
    main_grads: WeightGradients | None = None,
    late: DeferredWeightGradients | None = None,
) -> Tensor:
    """Run every token through its experts, by the first of `BACKENDS` that serves the call.

    Args:
        call: the call with expert ids and without `maps`.
        max_rows: upper bound on the number of ids below E, guaranteed by the caller; or None.
        recompute_h: see `moe_mlp`.
        main_grads: see `moe_mlp`.
        late: see `moe_mlp`.

    Returns:
        y (T, D) in the dtype of x (autocast's under autocast).

    Raises:
        ConfigError: see `moe_mlp`.
    """
    assert call.ids_TK is not None
    if call.experts.slot_of_expert_E is not None:
        ids_TK = call.experts.slots_of(call.ids_TK)
        call = call._replace(ids_TK=ids_TK, experts=call.experts.by_slot())
    for backend in BACKENDS.values():
        if backend.serves(call):
            of_ids: Tensor = backend.of_ids(call) if backend.of_ids else backend.forward(call, [])
            return of_ids
    assert call.ids_TK is not None
    num_slots = call.experts.num_slots
    maps = route_metadata(call.ids_TK, num_slots, max_rows=max_rows, backend=call.backend)
    return compute_rows(call, maps, recompute_h=recompute_h, main_grads=main_grads, late=late)


def compute_rows(
    call: ExpertsCall,
    maps: RouteMetadata,
    *,
    recompute_h: bool = False,
    main_grads: WeightGradients | None = None,
    late: DeferredWeightGradients | None = None,
) -> Tensor:
    """Compute as `compute` does, for a call whose row order is known."""
    call = checked(call._replace(experts=call.experts.in_order()), maps)
    name = next(name for name, backend in BACKENDS.items() if backend.serves(call))
    backend = BACKENDS[name]
    buffers = main_buffers(call.experts, main_grads) if backend.trains else []
    if backend.backward is None:
        y_TD: Tensor = backend.forward(call, buffers)
        return y_TD
    can_save = backend.saves_invariant_h if call.batch_invariant else backend.trains
    save_h = can_save and not recompute_h and _wants_gradients(call)
    call = call._replace(backend=name)
    if late is not None and backend.trains:
        return late.run(call, buffers, save_h=save_h)
    return operator.run(call, buffers, save_h=save_h)


def _wants_gradients(call: ExpertsCall) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in call.differentiable)
