"""The forward and the two halves of the backward of `moe_mlp`, for schedules that call them apart.

A pipeline schedule sends the input's gradient to the previous stage first, and computes the weights' gradients when
it would otherwise wait (zero-bubble schedules: Qi et al., arXiv 2401.10241). Autograd sees none of these functions;
`torch.compile` does not look into them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.expert_types import HiddenGradients, WeightGradients, Weights
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.inputs import make_buffers, make_call
from expertmesh.ops.route_metadata import RouteMetadata


@dataclass(frozen=True)
class HiddenRows:
    """What `moe_mlp_weight_grads` needs of `moe_mlp_data_grads`: A' and the gradient of H, N * (1 + G) * F elements.

    Attributes:
        slices: one entry per slice of the weights; their layout is the backend's own.
    """

    slices: tuple[HiddenGradients, ...]


def moe_mlp_forward(
    x_TD: Tensor,
    w_in_EGFD: Weights,
    w_out_EDF: Weights,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    *,
    activation: str,
    b_in_EGF: Weights | None = None,
    b_out_ED: Tensor | None = None,
    save_h: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run `moe_mlp` without autograd.

    Args:
        x_TD: as for `moe_mlp`, and so are all arguments that are not named here.
        w_in_EGFD: see there.
        w_out_EDF: see there.
        weights_TK: see there.
        metadata: see there.
        activation: see there.
        b_in_EGF: see there.
        b_out_ED: see there.
        save_h: whether H is wanted for `moe_mlp_data_grads`, which computes it again otherwise.
        backend: see there; "reference" has no parts.

    Returns:
        y (T, D), to the bit that of `moe_mlp`, and H (R, G * F_i) of every slice of the weights (of the only one where they
        come whole), without rows unless save_h.

    Raises:
        ConfigError: shapes or types do not fit one another, or the backend is "reference".
    """
    shared = (w_in_EGFD, w_out_EDF, weights_TK, metadata, activation, b_in_EGF, b_out_ED, backend)
    with torch.no_grad():
        call = _call(x_TD, *shared)
        with without_autocast(x_TD.device):
            y_TD, hidden = call.forward(save_h=save_h)
    return y_TD, tuple(hidden)


def moe_mlp_data_grads(
    grad_TD: Tensor,
    x_TD: Tensor,
    h_RH: Sequence[Tensor],
    w_in_EGFD: Weights,
    w_out_EDF: Weights,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    *,
    activation: str,
    b_in_EGF: Weights | None = None,
    b_out_ED: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, HiddenRows]:
    """Give the gradients of x and of the routing weights, and what the weights' gradients need.

    Args:
        grad_TD: (T, D) gradient of y, in its type.
        x_TD: as given to `moe_mlp_forward`, and so are all arguments that are not named here.
        h_RH: H from there; without rows it is computed again.
        w_in_EGFD: see there.
        w_out_EDF: see there.
        weights_TK: see there.
        metadata: see there.
        activation: see there.
        b_in_EGF: see there.
        b_out_ED: see there.
        backend: see there.

    Returns:
        dx (T, D), the gradient of the routing weights (T, K), both to the bit those of autograd, and the hidden rows for
        `moe_mlp_weight_grads`.

    Raises:
        ConfigError: as `moe_mlp_forward`.
    """
    shared = (w_in_EGFD, w_out_EDF, weights_TK, metadata, activation, b_in_EGF, b_out_ED, backend)
    with torch.no_grad():
        call = _call(x_TD, *shared)
        with without_autocast(x_TD.device):
            d_x, d_weights, kept = call.data_grads(grad_TD.contiguous(), h_RH)
    assert d_x is not None and d_weights is not None
    return d_x, d_weights, HiddenRows(kept)


def moe_mlp_weight_grads(
    grad_TD: Tensor,
    x_TD: Tensor,
    hidden: HiddenRows,
    w_in_EGFD: Weights,
    w_out_EDF: Weights,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    *,
    activation: str,
    b_in_EGF: Weights | None = None,
    b_out_ED: Tensor | None = None,
    main_grads: WeightGradients | None = None,
    backend: str = "auto",
) -> WeightGradients:
    """Give the gradients of the experts' weights and biases, or add them to buffers.

    Args:
        grad_TD: as given to `moe_mlp_data_grads`, and so are all arguments that are not named here.
        x_TD: see there.
        hidden: from there.
        w_in_EGFD: see there.
        w_out_EDF: see there.
        weights_TK: see there.
        metadata: see there.
        activation: see there.
        b_in_EGF: see there.
        b_out_ED: see there.
        main_grads: buffers to add to in place, as for `moe_mlp`; None: fresh tensors.
        backend: see there.

    Returns:
        The gradients, as tensors or tuples of slices as the weights were given, to the bit those of autograd; or
        `main_grads`.

    Raises:
        ConfigError: as `moe_mlp_forward`, or a buffer does not fit its weight.
    """
    shared = (w_in_EGFD, w_out_EDF, weights_TK, metadata, activation, b_in_EGF, b_out_ED, backend)
    with torch.no_grad():
        call = _call(x_TD, *shared)
        buffers = make_buffers(call, main_grads)
        with without_autocast(x_TD.device):
            found: Iterator[Any] = iter(
                call.weight_grads(grad_TD.contiguous(), hidden.slices, buffers)
            )
    if main_grads is not None:
        return main_grads
    w_in, w_out, b_in, b_out = (
        tuple(islice(found, len(several)))
        for several in (call.w_in, call.w_out, call.b_in, call.b_out)
    )
    if isinstance(w_in_EGFD, Tensor):
        return WeightGradients(w_in[0], w_out[0], *(b[0] if b else None for b in (b_in, b_out)))
    return WeightGradients(w_in, w_out, b_in or None, b_out[0] if b_out else None)


def _call(
    x_TD: Tensor,
    w_in: Weights,
    w_out: Weights,
    weights_TK: Tensor,
    metadata: RouteMetadata,
    activation: str,
    b_in: Weights | None,
    b_out_ED: Tensor | None,
    backend: str,
) -> ExpertsCall:
    if backend == "reference":
        raise ConfigError(
            "backend is 'reference', which is plain autograd and has no parts; use 'auto', 'torch' or 'triton'"
        )
    return make_call(
        x_TD,
        w_in,
        w_out,
        weights_TK,
        metadata,
        activation=activation,
        b_in=b_in,
        b_out_ED=b_out_ED,
        backend=backend,
    )
