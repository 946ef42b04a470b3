"""Quantised experts on a GPU: grouped products with their stored matrices for few rows, else with widened ones."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops import triton_linear
from expertmesh.ops.activation import inner_name, num_branches, pointwise_, second_branch
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.torch_forward import row_weights
from expertmesh.ops.experts.weights import FORMATS, ExpertSlice
from expertmesh.ops.route_metadata import RouteMetadata
from expertmesh.spec.resting import WIDENED_BYTES

_MOST_ROWS = 64
"""Rows per expert, on average, up to which stored matrices are multiplied; with more, widening them once is less
work."""


def serves(c: ExpertsCall) -> bool:
    """Whether `forward` supports this call: checked, with few rows per expert and without gradients."""
    w = c.experts
    return (
        c.maps is not None
        and c.backend == "triton"
        and "quantized_triton" in FORMATS[w.format].backends
        and w.is_whole
        and c.maps.token_of_row_N.shape[0] <= _MOST_ROWS * w.num_experts
        and not c.has_adapters
        and not c.batch_invariant
        and not (torch.is_grad_enabled() and (c.x_TD.requires_grad or c.weights_TK.requires_grad))
    )


def forward(c: ExpertsCall, _: list[Tensor]) -> Tensor:
    """Compute y (T, D); does not synchronise."""
    from expertmesh.kernels.combine import sum_rows

    maps, experts = c.maps, c.experts.slices()[0]
    assert maps is not None
    b_EH = None if experts.b_in_EGF is None else experts.b_in_EGF.flatten(1)
    rows = _cut(maps)
    h_RH = _product(c.x_TD, experts, rows, is_in=True, gather=True, bias_EN=b_EH)
    gate, *up = h_RH.chunk(num_branches(experts.activation), 1)
    inner = inner_name(experts.activation)
    a_RF = pointwise_(gate.contiguous(), inner)
    for branch in up:
        a_RF.mul_(second_branch(branch, inner))
    s_R = row_weights(c.weights_TK, maps, len(a_RF), c.x_TD.dtype)
    a_RF = a_RF.mul_(s_R[:, None]).to(c.x_TD.dtype)
    y_RD = _product(a_RF, experts, rows, is_in=False, gather=False, bias_EN=experts.b_out_ED, weights_R=s_R)
    y_TD = sum_rows(y_RD, maps.offsets_E[-1:], maps.row_of_slot_N, c.weights_TK.shape[1])
    return y_TD.to(c.x_TD.dtype)


def _cut(maps: RouteMetadata) -> Any:
    """Rows in tiles of `quantized_products.block_of`, for the products of both matrices."""
    from expertmesh.kernels import quantized_products
    from expertmesh.kernels.grouped import Rows

    each = -(-maps.token_of_row_N.shape[0] // (len(maps.offsets_E) - 1))
    return Rows.cut(maps.offsets_E, maps.token_of_row_N, maps.slot_of_row_N, quantized_products.rows_of_block(each))


def _product(
    x: Tensor,
    experts: ExpertSlice,
    rows: Any,
    *,
    is_in: bool,
    gather: bool,
    bias_EN: Tensor | None = None,
    weights_R: Tensor | None = None,
) -> Tensor:
    """Multiply sorted rows, or tokens if `gather`, by stored matrices: (R, N) in FP32."""
    from expertmesh.kernels import quantized_products

    w_ENK, scales, rows_per_branch = _stored(experts, is_in)
    each = -(-rows.num_rows // len(w_ENK))
    block = quantized_products.block_of(experts.format, x.shape[1], scales.shape[-1], each)
    return quantized_products.grouped_product(
        x.contiguous(),
        w_ENK,
        scales,
        rows,
        format=experts.format,
        gather=gather,
        rows_per_branch=rows_per_branch,
        block=block,
        bias_EN=None if bias_EN is None else bias_EN.contiguous(),
        weights_R=weights_R,
    )


def _stored(experts: ExpertSlice, is_in: bool) -> tuple[Tensor, Tensor, int]:
    """Values (E, N, ...), scales and rows per branch of w_in or w_out."""
    w, scales = (experts.w_in_EGFD, experts.scales_in) if is_in else (experts.w_out_EDF, experts.scales_out)
    assert scales is not None
    return (w.flatten(1, 2) if is_in else w), scales.contiguous(), w.shape[-2]


def widened(experts: ExpertSlice, dtype: torch.dtype, *, is_in: bool, at: slice = slice(None)) -> Tensor:
    """Widen w_in (E, G * F, D) or w_out (E, D, F) of some experts; does not synchronise."""
    from expertmesh.kernels import quantized_products

    w_ENK, scales, rows_per_branch = _stored(experts, is_in)
    return quantized_products.widen(
        w_ENK[at].contiguous(), scales[at], format=experts.format, rows_per_branch=rows_per_branch, dtype=dtype
    )


def linear(
    x_RK: Tensor,
    experts: ExpertSlice,
    offsets_E: Tensor,
    b_EN: Tensor | None,
    *,
    is_in: bool,
    transposed: bool = False,
    batch_invariant: bool = False,
    widened_bytes: int = WIDENED_BYTES,
) -> Tensor:
    """Multiply rows sorted by expert by w_in or w_out, or by their transposes, in the dtype of x; zeros behind the last
    live row; does not synchronise."""
    E, G, F, D = experts.shape
    if not (transposed or batch_invariant or len(x_RK) > _MOST_ROWS * E):
        own_R = torch.arange(len(x_RK), dtype=torch.int32, device=x_RK.device)
        rows = _cut(RouteMetadata(offsets_E, own_R, own_R, own_R))
        y_RN = _product(x_RK, experts, rows, is_in=is_in, gather=False, bias_EN=b_EN)
        return y_RN.masked_fill_((own_R >= offsets_E[-1])[:, None], 0).to(x_RK.dtype)
    N, K = (G * F, D) if is_in else (D, F)
    y_RN = x_RK.new_empty(len(x_RK), K if transposed else N)
    # some experts at a time, in order, because rows behind an expert's are zeroed; by fours for aligned offsets
    size = max(4, widened_bytes // (N * K * x_RK.element_size()) // 4 * 4)
    for first in range(0, E, size):
        at = slice(first, min(first + size, E))
        w_ENK, bias_EN = widened(experts, x_RK.dtype, is_in=is_in, at=at), None if b_EN is None else b_EN[at]
        bounds = offsets_E[at.start : at.stop + 1]
        how = {"transposed": transposed, "batch_invariant": batch_invariant}
        triton_linear.forward(x_RK, w_ENK, bounds, bias_EN, **how, out=y_RN)
    return y_RN
