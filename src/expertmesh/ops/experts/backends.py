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
    few_rows,
    invariant,
    native,
    quantized_formats,
    quantized_rows,
    quantized_triton,
    torch_backward,
    torch_forward,
    triton_backend,
)
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.ops.plain_call import runs_plainly


@dataclass(frozen=True)
class Backend:
    """An implementation of the experts.

    Attributes:
        serves: function that tells whether it can compute a call. It is asked twice: first for the call with ids only
            (`maps` is None), then for the call checked, cast, with `maps`, and with "torch", "triton" or "reference" as
            `backend`.
        forward: with a `backward`: (call, *, save_h) -> y and H of every slice, run inside the operator, not seen by
            autograd. Without one: (call, buffers) -> y, differentiable by itself or not at all; None passes the call to
            the next backend that serves it.
        backward: (call, grad_TD, hidden, needs, main) -> gradients of `ExpertsCall.differentiable`.
        trains: whether it supports main gradients and, if the caller wants it, saves H for the backward.
        is_triton: whether gradients of interleaved weights are interleaved too.
        data_grads: first half of the backward, for deferred weight gradients.
        weight_grads: second half of the backward.
    """

    serves: Callable[[ExpertsCall], bool]
    forward: Callable[..., Any]
    backward: Callable[..., list[Tensor | None]] | None = None
    trains: bool = False
    is_triton: bool = False
    data_grads: Callable[..., Any] | None = None
    weight_grads: Callable[..., Any] | None = None


def _has_few_rows(c: ExpertsCall) -> bool:
    experts = c.experts
    return (
        c.ids_TK is not None
        and c.is_direct
        and "few_rows" in FORMATS[experts.format].backends
        and few_rows.serves(
            c.x_TD,
            c.ids_TK.numel(),
            experts.w_in[0],
            experts.w_out[0],
            c.weights_TK,
            backend=c.backend,
        )
        and runs_plainly(*experts.b_in, experts.b_out)
    )


def _few_rows(c: ExpertsCall, _: list[Tensor]) -> Tensor | None:
    experts = c.experts
    assert c.ids_TK is not None
    return few_rows.moe_mlp_of_few(
        c.x_TD,
        experts.w_in[0],
        experts.w_out[0],
        c.ids_TK,
        c.weights_TK,
        activation=experts.activation,
        b_in_EGF=experts.b_in[0] if experts.b_in else None,
        b_out_ED=experts.b_out,
    )


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


def _reads(c: ExpertsCall, name: str) -> bool:
    """Whether the call has `maps`, and the named backend reads its weight format."""
    return c.maps is not None and name in FORMATS[c.experts.format].backends


assert quantized_formats.QUANTIZED  # the import adds its formats to FORMATS
_BY_TORCH = partial(call.backward, torch_backward.backward)
_BY_TRITON = partial(call.backward, triton_backend.backward)

BACKENDS: dict[str, Backend] = {
    "native": Backend(native.serves_ids, native.forward_of_ids),
    "few_rows": Backend(_has_few_rows, _few_rows),
    "quantized_rows": Backend(quantized_rows.serves, quantized_rows.forward),
    "adapter_runs": Backend(
        lambda c: c.maps is not None and bool(c.runs), adapters.forward_of_runs
    ),
    "adapters": Backend(lambda c: c.maps is not None and c.adapters is not None, adapters.forward),
    "reference": Backend(
        lambda c: c.maps is not None and c.backend == "reference", _reference, trains=True
    ),
    "quantized_triton": Backend(quantized_triton.serves, quantized_triton.forward),
    "native_rows": Backend(
        native.serves_rows,
        native.forward_of_rows,
        _BY_TORCH,
        trains=True,
        data_grads=partial(call.data_grads, torch_backward.data_grads),
        weight_grads=partial(call.weight_grads, torch_backward.weight_grads),
    ),
    "invariant_triton": Backend(
        lambda c: c.batch_invariant and c.backend == "triton" and _reads(c, "invariant_triton"),
        invariant.forward_triton,
        _BY_TRITON,
        is_triton=True,
    ),
    "invariant": Backend(
        lambda c: c.batch_invariant and c.maps is not None, invariant.forward, _BY_TORCH
    ),
    "triton": Backend(
        lambda c: c.backend == "triton" and _reads(c, "triton"),
        partial(call.forward, triton_backend.forward),
        _BY_TRITON,
        trains=True,
        is_triton=True,
        data_grads=partial(call.data_grads, triton_backend.data_grads),
        weight_grads=partial(call.weight_grads, triton_backend.weight_grads),
    ),
    "torch": Backend(
        lambda c: c.maps is not None,
        partial(call.forward, torch_forward.forward),
        _BY_TORCH,
        trains=True,
        data_grads=partial(call.data_grads, torch_backward.data_grads),
        weight_grads=partial(call.weight_grads, torch_backward.weight_grads),
    ),
}
"""Backends by name, in the order in which they are asked."""
