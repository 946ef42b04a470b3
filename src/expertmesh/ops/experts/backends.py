"""Backends of the experts: `BACKENDS` is the only place that selects one.

The first row that serves a call computes it. A new backend is one more row; `docs/extending.md` shows one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from expertmesh.ops import reference
from expertmesh.ops.experts import (
    adapters,
    call,
    invariant,
    native,
    quantized_formats,
    quantized_triton,
    torch_backward,
    torch_forward,
    triton_backend,
)
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import FORMATS


@dataclass(frozen=True)
class Backend:
    """An implementation of the experts.

    Attributes:
        serves: function that tells whether it can compute a call. It is asked twice: first for the call with ids only
            (`maps` is None), then for the call checked, cast, with `maps`, and with "torch", "triton" or "reference" as
            `backend`.
        forward: with a `backward`: (call, *, save_h) -> y and H of every slice, run inside the operator, not seen by
            autograd. Without one: (call, buffers) -> y, differentiable by itself or not at all.
        of_ids: (call) -> y of a call with ids only, not differentiable; None: `forward` computes it.
        backward: (call, grad_TD, hidden, needs, main) -> gradients of `ExpertsCall.differentiable`.
        trains: whether it supports main gradients and, if the caller wants it, saves H for the backward.
        saves_invariant_h: whether it saves H of batch-invariant calls as well; else their backward recomputes it.
        is_triton: whether gradients of interleaved weights are interleaved too.
        data_grads: first half of the backward, for deferred weight gradients.
        weight_grads: second half of the backward.
    """

    serves: Callable[[ExpertsCall], bool]
    forward: Callable[..., Any]
    backward: Callable[..., list[Tensor | None]] | None = None
    of_ids: Callable[[ExpertsCall], Tensor] | None = None
    trains: bool = False
    saves_invariant_h: bool = False
    is_triton: bool = False
    data_grads: Callable[..., Any] | None = None
    weight_grads: Callable[..., Any] | None = None


def _reference(c: ExpertsCall, buffers: list[Tensor]) -> Tensor:
    """Compute the oracle on the concatenated slices."""
    experts, maps = c.experts, c.maps
    assert maps is not None
    if buffers:
        pairs = zip(experts.parameters, buffers, strict=True)
        experts = experts.with_parameters([reference.deposit(*pair) for pair in pairs])
    one = experts.joined(c.x_TD.dtype)
    return reference.moe_mlp(
        c.x_TD,
        one.w_in_EGFD,
        one.w_out_EDF,
        c.weights_TK,
        maps.offsets_E,
        maps.token_of_row_N,
        maps.slot_of_row_N,
        maps.row_of_slot_N,
        activation=one.activation,
        b_in_EGF=one.b_in_EGF,
        b_out_ED=one.b_out_ED,
    )


def _triton(c: ExpertsCall, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
    if c.batch_invariant:
        return invariant.forward_triton(c)
    return call.forward(triton_backend.forward, c, save_h=save_h)


def _torch(c: ExpertsCall, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
    if c.batch_invariant:
        return invariant.forward(c)
    return call.forward(torch_forward.forward, c, save_h=save_h)


assert quantized_formats.QUANTIZED  # the import adds its formats to FORMATS
_BY_TORCH: dict[str, Any] = {
    "backward": partial(call.backward, torch_backward.backward),
    "trains": True,
    "data_grads": partial(call.data_grads, torch_backward.data_grads),
    "weight_grads": partial(call.weight_grads, torch_backward.weight_grads),
}

BACKENDS: dict[str, Backend] = {
    "native": Backend(
        native.serves,
        native.forward_of_rows,
        of_ids=native.forward_of_ids,
        saves_invariant_h=True,
        **_BY_TORCH,
    ),
    "quantized_triton": Backend(quantized_triton.serves, quantized_triton.forward),
    "adapters": Backend(adapters.serves, adapters.forward),
    "reference": Backend(lambda c: c.maps is not None and c.backend == "reference", _reference, trains=True),
    "triton": Backend(
        lambda c: c.maps is not None and c.backend == "triton" and "triton" in FORMATS[c.experts.format].backends,
        _triton,
        partial(call.backward, triton_backend.backward),
        trains=True,
        is_triton=True,
        data_grads=partial(call.data_grads, triton_backend.data_grads),
        weight_grads=partial(call.weight_grads, triton_backend.weight_grads),
    ),
    "torch": Backend(lambda c: c.maps is not None, _torch, **_BY_TORCH),
}
"""Backends by name, in the order in which they are asked."""
