"""Torch backend of `moe_mlp`, forward: one GEMM per expert and step over its block of sorted rows.

Buffers are reused from expert to expert so that they stay in the cache. H is written in place, and only the gathered
tokens are copied. Nothing here is seen by autograd. The backward is in `torch_backward.py`.
"""

import torch
from torch import Tensor

from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.cpu.activation_passes import passes_for
from expertmesh.ops.dtypes import accumulate_dtype, gemm_dtype
from expertmesh.ops.experts.expert_spans import make_runs
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.permute import sum_rows
from expertmesh.ops.route_metadata import RouteMetadata

FEW_ELEMENTS = 1 << 20
"""Maximum number of elements of H for which several experts are processed together."""


def forward(
    x_TD: Tensor, experts: ExpertSlice, weights_TK: Tensor, maps: RouteMetadata, *, save_h: bool
) -> tuple[Tensor, Tensor]:
    """Compute (y (T, D), H (R, G * F)); H is empty unless save_h. Synchronises with a GPU to read the offsets."""
    _, G, F, D = experts.shape
    num_rows = maps.token_of_row_N.shape[0]
    bounds = maps.offsets_E.tolist()
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    most_places = FEW_ELEMENTS // (G * F)
    runs = make_runs(bounds, most_places, x_TD.device, dtype, is_narrow=experts.are_narrow)
    h_all = x_TD.new_empty(num_rows if save_h else 0, G * F)
    pad = max((run.padding for run in runs), default=0)
    most = max((run.rows.stop - run.rows.start for run in runs), default=0) + pad
    x_buffer = x_TD.new_empty(most, D)
    h_buffer, a_buffer = (x_TD.new_empty(most, width, dtype=dtype) for width in (G * F, F))
    y_RD = x_TD.new_empty(bounds[-1] + pad, D, dtype=dtype)
    s_R = row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)
    passes = passes_for(experts.activation, a_buffer, num_rows=num_rows, backward=False)
    for run in runs:
        start, stop = run.rows.start, run.rows.stop
        n, m = stop - start, stop - start + run.padding
        x = _gather_tokens(x_TD, maps.token_of_row_N[start:stop], x_buffer[:m], dtype)
        # padding writes to rows of later experts, which overwrite it, but never behind the last row
        direct = save_h and dtype == x_TD.dtype and start + m <= num_rows
        h = h_all[start : start + m] if direct else h_buffer[:m]
        a = a_buffer[:m]
        x_rows, h_rows = run.rows_of(x, start), run.rows_of(h, start)
        w_ins = experts.w_ins(run.experts, dtype, x_TD.dtype)
        for w_in, e, x_nD, h_nH in zip(w_ins, run.experts, x_rows, h_rows, strict=True):
            hidden(experts, e, x_nD, h_nH, w_in)
        if save_h and not direct:
            h_all[start:stop].copy_(h[:n])
        passes.forward(h[:n], s_R[start:stop], a)
        # oneDNN's AMX products with F not a multiple of 32 read into the next row and multiply it by zeros
        a[n:].zero_()
        y = y_RD[start : start + m]
        a_rows, y_rows = run.rows_of(a, start), run.rows_of(y, start)
        w_outs = experts.w_outs(run.experts, dtype, x_TD.dtype)
        for w_out, a_nF, y_nD in zip(w_outs, a_rows, y_rows, strict=True):
            cpu_products.product_into(a_nF, w_out.T, y_nD)
    if experts.b_out_ED is not None:
        for e, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if stop > start:
                y_RD[start:stop].add_(s_R[start:stop, None] * experts.b_out_ED[e])
    y_TD = sum_rows(y_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
    return y_TD.to(x_TD.dtype), h_all


def hidden(experts: ExpertSlice, e: int, x_RD: Tensor, out_RH: Tensor, w_in: Tensor) -> None:
    """Write the pre-activations of one expert's rows with its `w_in`, all in the dtype of the products."""
    if experts.b_in_EGF is None:
        cpu_products.product_into(x_RD, w_in.T, out_RH)
    else:
        # bias inside the product, so that the sum is rounded once: a second rounding moves H across the kink of ReLU
        bias = experts.b_in_EGF[e].flatten().to(x_RD.dtype)
        cpu_products.linear_into(x_RD, w_in, out_RH, bias_N=bias)


def _gather_tokens(source_TD: Tensor, tokens_R: Tensor, out_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather tokens into the first rows of a buffer, with zeros behind, in the dtype of the products."""
    num_rows = tokens_R.shape[0]
    torch.index_select(source_TD, 0, tokens_R, out=out_RD[:num_rows])
    if num_rows < out_RD.shape[0]:
        out_RD[num_rows:].zero_()
    return out_RD.to(dtype)


def row_weights(weights_TK: Tensor, maps: RouteMetadata, num_live: int, dtype: torch.dtype) -> Tensor:
    """Routing weights of the live rows (R,), FP32 or FP64."""
    rows = weights_TK.reshape(-1).index_select(0, maps.slot_of_row_N[:num_live])
    return rows.to(accumulate_dtype(dtype))
