"""Quantised experts on a GPU: grouped products with their stored matrices for few rows, else with widened ones."""

import torch
from torch import Tensor

from expertmesh.ops import triton_linear
from expertmesh.ops.activation import inner_name, num_branches, pointwise_, second_branch
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.torch_forward import row_weights
from expertmesh.ops.experts.weights import FORMATS, ExpertSlice
from expertmesh.ops.route_metadata import RouteMetadata

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
    h_RH = _product(c.x_TD, experts, maps, is_in=True, gather=True, bias_EN=b_EH)
    gate, *up = h_RH.chunk(num_branches(experts.activation), 1)
    inner = inner_name(experts.activation)
    a_RF = pointwise_(gate.contiguous(), inner)
    for branch in up:
        a_RF.mul_(second_branch(branch, inner))
    s_R = row_weights(c.weights_TK, maps, len(a_RF), c.x_TD.dtype)
    a_RF = a_RF.mul_(s_R[:, None]).to(c.x_TD.dtype)
    y_RD = _product(a_RF, experts, maps, is_in=False, gather=False, bias_EN=experts.b_out_ED, weights_R=s_R)
    y_TD = sum_rows(y_RD, maps.offsets_E[-1:], maps.row_of_slot_N, c.weights_TK.shape[1])
    return y_TD.to(c.x_TD.dtype)


def _product(
    x: Tensor,
    experts: ExpertSlice,
    maps: RouteMetadata,
    *,
    is_in: bool,
    gather: bool,
    bias_EN: Tensor | None = None,
    weights_R: Tensor | None = None,
) -> Tensor:
    """Multiply sorted rows, or tokens if `gather`, by stored matrices: (R, N) in FP32."""
    from expertmesh.kernels import quantized_products
    from expertmesh.kernels.grouped import Rows

    w_ENK, scales, rows_per_branch = _stored(experts, is_in)
    num_rows = maps.token_of_row_N.shape[0]
    block = quantized_products.block_of(experts.format, x.shape[1], scales.shape[-1], -(-num_rows // len(w_ENK)))
    return quantized_products.grouped_product(
        x.contiguous(),
        w_ENK,
        scales,
        Rows.cut(maps.offsets_E, maps.token_of_row_N, maps.slot_of_row_N, block["BLOCK_M"]),
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


def widened(experts: ExpertSlice, dtype: torch.dtype, *, is_in: bool) -> Tensor:
    """Widen w_in (E, G * F, D) or w_out (E, D, F) of all experts; does not synchronise."""
    from expertmesh.kernels import quantized_products

    w_ENK, scales, rows_per_branch = _stored(experts, is_in)
    return quantized_products.widen(
        w_ENK.contiguous(), scales, format=experts.format, rows_per_branch=rows_per_branch, dtype=dtype
    )


def dense(experts: ExpertSlice, dtype: torch.dtype) -> ExpertSlice:
    """Widen quantised experts; dense ones are returned as they are."""
    if experts.format == "dense":
        return experts
    _, G, _, _ = experts.shape
    w_in, w_out = (widened(experts, dtype, is_in=is_in) for is_in in (True, False))
    return ExpertSlice(w_in.unflatten(1, (G, -1)), w_out, experts.b_in_EGF, experts.b_out_ED, experts.activation)


def linear(
    x_RK: Tensor,
    experts: ExpertSlice,
    offsets_E: Tensor,
    b_EN: Tensor | None,
    *,
    is_in: bool,
    transposed: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiply rows sorted by expert by w_in or w_out, or by their transposes, in the dtype of x; zeros behind the last
    live row; does not synchronise."""
    if transposed or batch_invariant or len(x_RK) > _MOST_ROWS * (len(offsets_E) - 1):
        w_ENK = widened(experts, x_RK.dtype, is_in=is_in)
        how = {"transposed": transposed, "batch_invariant": batch_invariant}
        return triton_linear.forward(x_RK, w_ENK, offsets_E, b_EN, **how)
    own_R = torch.arange(len(x_RK), dtype=torch.int32, device=x_RK.device)
    y_RN = _product(
        x_RK, experts, RouteMetadata(offsets_E, own_R, own_R, own_R), is_in=is_in, gather=False, bias_EN=b_EN
    )
    return y_RN.masked_fill_((own_R >= offsets_E[-1])[:, None], 0).to(x_RK.dtype)
