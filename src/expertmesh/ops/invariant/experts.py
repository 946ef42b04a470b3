"""The experts as one operator whose result for a token is the same to the bit whatever batch it sits in."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import inner_name
from expertmesh.ops.cpu.forward import row_weights
from expertmesh.ops.dtypes import accumulate_dtype, gemm_dtype, without_autocast
from expertmesh.ops.expert_types import Experts, WeightGradients, Weights
from expertmesh.ops.experts import operator, triton_backend
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.inputs import make_call
from expertmesh.ops.experts.late import LateWeightGradients
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.invariant.operators import BlockProduct
from expertmesh.ops.permute import sum_rows
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata

_CHUNK_ROWS = 1024
"""Rows of an expert that go through its steps together: a bound on the memory of FP32 intermediates."""


def invariant_moe_mlp(
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
    late: LateWeightGradients | None = None,
    backend: str = "auto",
) -> Tensor:
    """`moe_mlp` with a fixed order of every sum; its arguments and result, to rounding.

    Differentiable once, by the backward of `moe_mlp`, which computes H again: made for inference, where `recompute_h`,
    `main_grads` and `late` say nothing. Slices are joined by a copy. On the torch backend it synchronises with a GPU to read the
    offsets.

    Raises:
        ConfigError: as `moe_mlp`, or the backend is "reference", which promises nothing.
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
    if call.backend == "reference":
        raise ConfigError(
            "backend='reference' with batch_invariant: its sums follow the batch; use auto, torch or triton"
        )
    return _moe_mlp(*call, [], False)[0]


def invariant_mlp(
    x_TD: Tensor,
    w_in_GFD: Tensor,
    w_out_DF: Tensor,
    *,
    activation: str,
    b_in_GF: Tensor | None = None,
    b_out_D: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One feed-forward block that every token passes, (T, D) -> (T, D): `invariant_moe_mlp` with one expert."""
    T = x_TD.shape[0]
    ids_TK = torch.zeros(T, 1, dtype=torch.int64, device=x_TD.device)
    dtype = accumulate_dtype(x_TD.dtype)
    return invariant_moe_mlp(
        x_TD,
        w_in_GFD[None],
        w_out_DF[None],
        torch.ones(T, 1, dtype=dtype, device=x_TD.device),
        route_metadata(ids_TK, 1, backend=backend),
        activation=activation,
        b_in_EGF=None if b_in_GF is None else b_in_GF[None],
        b_out_ED=None if b_out_D is None else b_out_D[None],
        backend=backend,
    )


@torch.library.custom_op("expertmesh::invariant_moe_mlp", mutates_args=(), schema=operator.FORWARD)
def _moe_mlp(*args: Any) -> list[Tensor]:
    """As the operator of `moe_mlp` without saved pre-activations, whose backward it has."""
    call = ExpertsCall(*args[:-2])
    parts = (call.w_in, call.w_out, call.b_in)
    w_in, w_out, b_in = (
        torch.cat(part, 2) if len(part) > 1 else next(iter(part), None) for part in parts
    )
    assert w_in is not None and w_out is not None
    experts = Experts(w_in, w_out, b_in, next(iter(call.b_out), None), call.activation)
    x_TD, weights_TK, maps = call.x_TD, call.weights_TK, RouteMetadata(*call.maps)
    with without_autocast(x_TD.device):
        if call.backend == "triton":
            y_TD, _ = triton_backend.forward(
                x_TD, experts, weights_TK, maps, save_h=False, batch_invariant=True
            )
        else:
            y_TD = _in_blocks(x_TD, experts, weights_TK, maps)
    return [y_TD, *operator.without_rows(call)]


_moe_mlp.register_fake(operator.shapes)
_moe_mlp.register_autograd(operator.gradients, setup_context=operator.setup_context)


def _in_blocks(x_TD: Tensor, experts: Experts, weights_TK: Tensor, maps: RouteMetadata) -> Tensor:
    """One expert after the other, its rows in blocks of one shape."""
    D = x_TD.shape[1]
    bounds = maps.offsets_E.tolist()
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    y_RD = x_TD.new_empty(bounds[-1], D, dtype=dtype)
    s_R = row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
    for e, (first, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if first == stop:
            continue
        b_in = None if experts.b_in_EGF is None else experts.b_in_EGF[e].flatten().to(dtype)
        b_out = None if experts.b_out_ED is None else experts.b_out_ED[e]
        up = BlockProduct.of(experts.w_in(e, dtype), b_in)
        down = BlockProduct.of(experts.w_out(e, dtype))
        for start in range(first, stop, _CHUNK_ROWS):
            rows = slice(start, min(start + _CHUNK_ROWS, stop))
            x_RD = x_TD.index_select(0, maps.token_of_row_N[rows])
            a_RF = _hidden(x_RD, up, s_R[rows, None], experts)
            down.into(a_RF, y_RD[rows])
            if b_out is not None:
                y_RD[rows] += s_R[rows, None] * b_out
    y_TD = sum_rows(y_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
    return y_TD.to(x_TD.dtype)


def _hidden(x_RD: Tensor, up: BlockProduct, s_R1: Tensor, experts: Experts) -> Tensor:
    """s * act(H) in FP32 or FP64, from H rounded to the type of the products."""
    _, G, F, _ = experts.w_in_EGFD.shape
    h_RH = up.into(x_RD, x_RD.new_empty(x_RD.shape[0], G * F, dtype=up.w_NK.dtype))
    h_RGF = h_RH.to(s_R1.dtype).unflatten(1, (G, F))
    return invariant.activate(h_RGF, inner_name(experts.activation)) * s_R1
