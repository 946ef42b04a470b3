"""Batch-invariant experts where no kernels of ours compute them: a token's result is bitwise the same in every batch.

Made for inference, but differentiable once, by the backward of the other backends, which recomputes H. Slices are
concatenated by a copy. Without Triton it synchronises with a GPU to read the offsets.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from expertmesh.ops import native_linear
from expertmesh.ops.activation import inner_name
from expertmesh.ops.dtypes import gemm_dtype
from expertmesh.ops.experts import triton_backend
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.native import dtype_of_rows
from expertmesh.ops.experts.torch_forward import row_weights
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.permute import sum_rows_in_order

_CHUNK_ROWS = 1024
"""Number of rows processed together; bounds the memory of FP32 intermediates."""


def forward_triton(call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """Compute y (T, D) by kernels whose tiles do not depend on the number of rows; H has no rows."""
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


def forward(call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """Compute y (T, D) by batch-invariant products; H has no rows."""
    return forward_of_tokens(call), _without_rows(call)


def forward_of_tokens(call: ExpertsCall) -> Tensor:
    """Compute y (T, D) with each token's adapters; rows without adapters get the bits of `forward`."""
    x_TD, maps = call.x_TD, call.maps
    assert maps is not None
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    # whole weights stay in their format: one expert is widened at a time
    w = call.experts
    experts = w.slices()[0] if w.is_whole else w.joined(dtype)
    E, G, F, D = experts.shape
    num_rows = int(maps.offsets_E[-1])
    id_R = torch.repeat_interleave(maps.offsets_E.diff().to(torch.int64), output_size=num_rows)
    s_R1 = row_weights(call.weights_TK, maps, num_rows, x_TD.dtype)[:, None]
    y_RD = x_TD.new_empty(num_rows, D, dtype=dtype_of_rows(x_TD.device, x_TD.dtype))
    own = call.of_tokens
    for start in range(0, num_rows, _CHUNK_ROWS):
        rows = slice(start, min(start + _CHUNK_ROWS, num_rows))
        token_n, s_n1, id_n = maps.token_of_row_N[rows], s_R1[rows], id_R[rows]
        x_nD = x_TD.index_select(0, token_n).to(dtype)
        h_nH = _products(x_nD, experts, id_n, x_TD.dtype, is_in=True)
        if own is not None:
            _add_adapters(own.on_in, own.slot_T[token_n], id_n, E, x_nD, h_nH)
        h_nGF = h_nH.to(s_n1.dtype).unflatten(1, (G, F))
        a_nF = (invariant.activate(h_nGF, inner_name(experts.activation)) * s_n1).to(dtype)
        y_nD = _products(a_nF, experts, id_n, x_TD.dtype, is_in=False)
        if own is not None:
            _add_adapters(own.on_out, own.slot_T[token_n], id_n, E, a_nF, y_nD)
        b_ED = experts.b_out_ED
        y_RD[rows] = y_nD if b_ED is None else y_nD + s_n1 * b_ED.index_select(0, id_n)
    top_k = call.weights_TK.shape[1]
    return sum_rows_in_order(y_RD, maps.offsets_E, maps.row_of_slot_N, top_k).to(x_TD.dtype)


def _products(x_nK: Tensor, experts: ExpertSlice, id_n: Tensor, dtype: torch.dtype, *, is_in: bool) -> Tensor:
    """Products (n, N) of rows with the matrices of their experts, with the biases of w_in."""
    w, b_EGF = (experts.w_in if is_in else experts.w_out), experts.b_in_EGF if is_in else None
    b_EN = None if b_EGF is None else b_EGF.flatten(1).to(x_nK.dtype)
    w_ENK = experts.w_in_EGFD.flatten(1, 2) if is_in else experts.w_out_EDF

    def weight(e: int) -> Tensor:
        return w(e, x_nK.dtype, dtype)

    return _of_each(x_nK, id_n, w_ENK, b_EN, weight)


def _of_each(
    x_nK: Tensor,
    id_n: Tensor,
    w_ENK: Tensor,
    b_EN: Tensor | None = None,
    weight: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """Products (n, N) of rows with their own of E matrices: in one call, or matrix by matrix, as `weight` gives it."""
    if native_linear.serves_each(x_nK, w_ENK, b_EN):
        return native_linear.linear_of_each(x_nK, w_ENK, b_EN, id_n)
    y_nN = x_nK.new_empty(len(x_nK), w_ENK.shape[1])
    for e in id_n.unique().tolist():
        at, w_NK = (id_n == e).nonzero()[:, 0], w_ENK[e] if weight is None else weight(e)
        b_N = None if b_EN is None else b_EN[e]
        y_nN[at] = invariant.plain_linear(x_nK.index_select(0, at), w_NK, b_N, "torch")
    return y_nN


def _add_adapters(
    adapter: LowRank | None, slot_n: Tensor, id_n: Tensor, num_experts: int, x_nK: Tensor, y_nN: Tensor
) -> None:
    """Add the rows' adapters, thin products, to the products of the rows with their experts' matrices."""
    at_m = (slot_n >= 0).nonzero()[:, 0]
    if adapter is None or not len(at_m):
        return
    slot_m = slot_n[at_m]
    matrix_m = slot_m if adapter.is_shared else slot_m * num_experts + id_n[at_m]
    y_nN[at_m] += low_rank(x_nK.index_select(0, at_m), adapter, matrix_m, y_nN.dtype)


def low_rank(x_nK: Tensor, adapter: LowRank, matrix_n: Tensor, dtype: torch.dtype) -> Tensor:
    """Products s (x A^T) B^T, (n, N), of rows with their own of the adapter's matrices."""
    a_ErK, b_ENr = (factor.to(dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    low_nr = _of_each(x_nK, matrix_n, a_ErK)
    return _of_each(low_nr if adapter.scaling == 1 else low_nr * adapter.scaling, matrix_n, b_ENr)


def _without_rows(call: ExpertsCall) -> list[Tensor]:
    """H of every slice without rows, so that the backward recomputes it."""
    widths = [G * F for _, G, F, _ in (one.shape for one in call.experts.slices())]
    return [call.x_TD.new_empty(0, width) for width in widths]
