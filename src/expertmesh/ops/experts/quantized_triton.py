"""Quantised experts on a GPU: two grouped products with quantised weights, the activation, and the sum of each token's
rows."""

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name, num_branches, pointwise_, second_branch
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.torch_forward import row_weights

_FORMATS = ("int8", "int4", "fp8")


def serves(c: ExpertsCall) -> bool:
    """Whether `forward` supports this call: checked, without biases and gradients."""
    w = c.experts
    return (
        c.maps is not None
        and c.backend == "triton"
        and w.format in _FORMATS
        and w.is_whole
        and not w.b_in
        and w.b_out is None
        and not c.has_adapters
        and not c.batch_invariant
        and not (torch.is_grad_enabled() and (c.x_TD.requires_grad or c.weights_TK.requires_grad))
    )


def forward(c: ExpertsCall, _: list[Tensor]) -> Tensor:
    """Compute y (T, D); does not synchronise."""
    from expertmesh.kernels import quantized_products
    from expertmesh.kernels.combine import sum_rows
    from expertmesh.kernels.grouped import Rows

    maps, experts = c.maps, c.experts.slices()[0]
    assert maps is not None and experts.scales_in is not None and experts.scales_out is not None
    E, G, F, D = experts.shape
    num_rows = maps.token_of_row_N.shape[0]
    each = -(-num_rows // E)
    order = (maps.offsets_E, maps.token_of_row_N, maps.slot_of_row_N)
    block = quantized_products.block_of(experts.format, D, experts.scales_in.shape[-1], each)
    rows = Rows.cut(*order, block["BLOCK_M"])
    h_RH = quantized_products.grouped_product(
        c.x_TD.contiguous(),
        experts.w_in_EGFD.flatten(1, 2),
        experts.scales_in,
        rows,
        format=experts.format,
        gather=True,
        rows_per_branch=F,
        block=block,
    )
    gate, *up = h_RH.chunk(num_branches(experts.activation), 1)
    inner = inner_name(experts.activation)
    a_RF = pointwise_(gate.contiguous(), inner)
    for branch in up:
        a_RF.mul_(second_branch(branch, inner))
    a_RF.mul_(row_weights(c.weights_TK, maps, num_rows, c.x_TD.dtype)[:, None])
    block = quantized_products.block_of(experts.format, F, experts.scales_out.shape[-1], each)
    y_RD = quantized_products.grouped_product(
        a_RF.to(c.x_TD.dtype),
        experts.w_out_EDF,
        experts.scales_out,
        rows,
        format=experts.format,
        gather=False,
        rows_per_branch=D,
        block=block,
    )
    top_k = c.weights_TK.shape[1]
    y_TD = sum_rows(y_RD, maps.offsets_E[-1:], maps.row_of_slot_N, top_k)
    return y_TD.to(c.x_TD.dtype)
