"""The experts as computed where a token's result is to be the same to the bit whatever batch it sits in.

Made for inference: differentiable once, by the backward of the other backends, which computes H again. Slices are joined by a
copy. Without Triton it synchronises with a GPU to read the offsets.
"""

from torch import Tensor

from expertmesh.ops.activation import inner_name
from expertmesh.ops.dtypes import gemm_dtype
from expertmesh.ops.experts import triton_backend
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.torch_forward import row_weights
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.invariant.operators import BlockProduct
from expertmesh.ops.permute import sum_rows

_CHUNK_ROWS = 1024
"""Rows of an expert that go through its steps together: a bound on the memory of FP32 intermediates."""


def forward_triton(call: ExpertsCall, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
    """y (T, D) by kernels whose tiles do not depend on the number of rows, and H without rows."""
    assert call.maps is not None
    y_TD, _ = triton_backend.forward(
        call.x_TD,
        call.experts.joined(call.x_TD.dtype),
        call.weights_TK,
        call.maps,
        save_h=False,
        batch_invariant=True,
    )
    return y_TD, _without_rows(call)


def forward(call: ExpertsCall, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
    """y (T, D), one expert after the other, its rows in blocks of one shape; and H without rows."""
    x_TD, weights_TK, maps = call.x_TD, call.weights_TK, call.maps
    assert maps is not None
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    experts = call.experts.joined(dtype)
    bounds = maps.offsets_E.tolist()
    y_RD = x_TD.new_empty(bounds[-1], x_TD.shape[1], dtype=dtype)
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
    return y_TD.to(x_TD.dtype), _without_rows(call)


def _without_rows(call: ExpertsCall) -> list[Tensor]:
    """H of every slice with no row, so that the backward computes it again."""
    widths = [G * F for _, G, F, _ in (one.shape for one in call.experts.slices())]
    return [call.x_TD.new_empty(0, width) for width in widths]


def _hidden(x_RD: Tensor, up: BlockProduct, s_R1: Tensor, experts: ExpertSlice) -> Tensor:
    """s * act(H) in FP32 or FP64, from H rounded to the type of the products."""
    _, G, F, _ = experts.shape
    h_RH = up.into(x_RD, x_RD.new_empty(x_RD.shape[0], G * F, dtype=up.w_NK.dtype))
    h_RGF = h_RH.to(s_R1.dtype).unflatten(1, (G, F))
    return invariant.activate(h_RGF, inner_name(experts.activation)) * s_R1
