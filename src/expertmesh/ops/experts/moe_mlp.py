"""The experts of a mixture-of-experts layer as one autograd operator."""

import torch
from torch import Tensor

from expertmesh.ops import reference
from expertmesh.ops.expert_types import WeightGradients, Weights
from expertmesh.ops.experts import operator
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.inputs import make_buffers, make_call
from expertmesh.ops.experts.late import LateWeightGradients
from expertmesh.ops.route_metadata import RouteMetadata


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
    late: LateWeightGradients | None = None,
) -> Tensor:
    """Run every token through its experts and sum the weighted results.

    y_t = sum_j (s_tj * act(x_t W_in[e]^T + b_in[e])) W_out[e]^T + s_tj * b_out[e], with e the j-th expert of t
    and s its routing weight. The weight is applied by the experts, so combine is a plain sum and the gradient of
    the weight is rowsum(dA . A). Autograd saves X, the pre-activations H (G * F wide) and the metadata, nothing
    else; gradients are bitwise deterministic; the second derivative is an error, not a wrong number (the
    "reference" backend has it). Sums are FP32 (FP64 for FP64 input), the combine included.

    Args:
        x_TD: (T, D) tokens, float64, float32, bfloat16 or float16. Under autocast x, weights and biases of the
            experts are cast to its type here.
        w_in_EGFD: (E, G, F, D) first weights, G = 2 (gate, up) for gated activations and 1 for plain ones; or a list
            of slices along F, (E, G, F_i, D) each, which are used where they lie: the result is that of their
            concatenation to rounding, and every slice gets its gradient. Each slice costs one more gather of x and
            one more sum over the rows.
        w_out_EDF: (E, D, F) second weights; a list of (E, D, F_i) where w_in is one.
        weights_TK: (T, K) routing weights, of any floating-point type (FP32 as routers give them).
        metadata: from `route_metadata`.
        activation: swiglu, geglu, reglu, gelu (erf), relu, relu2 or silu.
        b_in_EGF: (E, G, F) or None; a list of (E, G, F_i) where w_in is one.
        b_out_ED: (E, D) or None.
        recompute_h: save X only and compute H again in the backward: one third of the forward's FLOPs more,
            G * N * F elements less, the same results to the bit. The "reference" backend saves what autograd saves.
        main_grads: buffers of FP32 (FP64 for FP64), one for each weight and bias, that the backward adds the weights'
            gradients to, in place and rounded to nothing narrower on the way; the weights then get no gradient from
            autograd (`.grad` stays None). For accumulation over micro-batches. A weight that needs no gradient
            leaves its buffer alone. Not to be combined with anything that runs a backward twice or reads weights'
            gradients from autograd (`torch.autograd.grad`, hooks, gradient scaling of `.grad`).
        backend: see `resolve_backend`. FP64 runs on PyTorch's GEMMs under "auto", and "triton" refuses it.
        late: takes what the weights' gradients need, and computes them (to the same bits) when asked after the backward of
            the tokens; autograd sees none of them then. All weights must want one. Not for `torch.compile`.

    Returns:
        y (T, D) in the type of x (of autocast under autocast).

    Raises:
        ConfigError: shapes or types do not fit one another.

    Example:
        >>> x_TD, weights_TK = torch.randn(5, 8), torch.full((5, 2), 0.5)
        >>> maps = route_metadata(torch.randint(0, 4, (5, 2)), 4)
        >>> y_TD = moe_mlp(x_TD, torch.randn(4, 2, 16, 8), torch.randn(4, 8, 16), weights_TK, maps, activation="swiglu")
        >>> y_TD.shape
        torch.Size([5, 8])
    """
    call = make_call(
        x_TD,
        w_in_EGFD,
        w_out_EDF,
        weights_TK,
        metadata,
        activation=activation,
        b_in=b_in_EGF,
        b_out_ED=b_out_ED,
        backend=backend,
    )
    buffers = make_buffers(call, main_grads)
    if call.backend == "reference":
        return _reference(call, buffers)
    save_h = torch.is_grad_enabled() and any(t.requires_grad for t in call.differentiable)
    if late is not None:
        return late.run(call, buffers, save_h=save_h and not recompute_h)
    return operator.run(call, buffers, save_h=save_h and not recompute_h)


def _reference(call: ExpertsCall, buffers: list[Tensor]) -> Tensor:
    """The oracle, on the concatenation of the slices."""
    parameters: list[Tensor | None] = list(call.parameters)
    if buffers:
        parameters = [reference.deposit(*pair) for pair in zip(parameters, buffers, strict=True)]
    slices = call.slices(parameters)
    biases = [s.b_in_EGF for s in slices if s.b_in_EGF is not None]
    return reference.moe_mlp(
        call.x_TD,
        torch.cat([s.w_in_EGFD for s in slices], 2),
        torch.cat([s.w_out_EDF for s in slices], 2),
        call.weights_TK,
        *call.maps,
        activation=call.activation,
        b_in_EGF=torch.cat(biases, 2) if biases else None,
        b_out_ED=slices[0].b_out_ED,
    )
