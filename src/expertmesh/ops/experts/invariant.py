"""Batch-invariant experts where no kernels of ours compute them: a token's result is bitwise the same in every batch.

Made for inference, but differentiable once, by the backward of the other backends, which recomputes H. Slices are
concatenated by a copy. Without Triton it synchronises with a GPU to read the offsets.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name
from expertmesh.ops.dtypes import gemm_dtype
from expertmesh.ops.experts import triton_backend
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.torch_forward import row_weights
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
    """Compute y (T, D) expert by expert, by batch-invariant products; H has no rows."""
    return forward_of_runs(call), _without_rows(call)


def forward_of_runs(call: ExpertsCall) -> Tensor:
    """Compute y (T, D) with each token's adapters; rows without adapters get the bits of `forward`."""
    x_TD, maps = call.x_TD, call.maps
    assert maps is not None
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    # whole weights stay in their format: one expert is widened at a time
    w = call.experts
    experts = w.slices()[0] if w.is_whole else w.joined(dtype)
    _, G, F, D = experts.shape
    bounds = maps.offsets_E.tolist()
    s_R1 = row_weights(call.weights_TK, maps, bounds[-1], x_TD.dtype)[:, None]
    y_RD = x_TD.new_empty(bounds[-1], D, dtype=dtype)
    run_of_T = _run_of_tokens(call)
    for e, rows in _chunks(bounds):
        token_n, s_n1 = maps.token_of_row_N[rows], s_R1[rows]
        run_of_n = None if run_of_T is None else run_of_T[token_n]
        b_EGF, b_ED = experts.b_in_EGF, experts.b_out_ED
        b_H = None if b_EGF is None else b_EGF[e].flatten().to(dtype)
        x_nD = x_TD.index_select(0, token_n).to(dtype)
        h_nH = invariant.plain_linear(x_nD, experts.w_in(e, dtype, x_TD.dtype), b_H, "torch")
        _add_adapters([run.on_in for run in call.runs], run_of_n, e, x_nD, h_nH)
        h_nGF = h_nH.to(s_n1.dtype).unflatten(1, (G, F))
        a_nF = (invariant.activate(h_nGF, inner_name(experts.activation)) * s_n1).to(dtype)
        y_nD = invariant.plain_linear(a_nF, experts.w_out(e, dtype, x_TD.dtype), None, "torch")
        _add_adapters([run.on_out for run in call.runs], run_of_n, e, a_nF, y_nD)
        y_RD[rows] = y_nD if b_ED is None else y_nD + s_n1 * b_ED[e]
    top_k = call.weights_TK.shape[1]
    return sum_rows_in_order(y_RD, maps.offsets_E, maps.row_of_slot_N, top_k).to(x_TD.dtype)


def _run_of_tokens(call: ExpertsCall) -> Tensor | None:
    """(T,) index of each token's adapter run, -1 without one; None without runs."""
    if not call.runs:
        return None
    run_of_T = torch.full((len(call.x_TD),), -1, device=call.x_TD.device)
    for number, run in enumerate(call.runs):
        run_of_T[run.first : run.stop] = number
    return run_of_T


def _add_adapters(
    of_runs: Sequence[LowRank | None],
    run_of_n: Tensor | None,
    expert: int,
    x_nK: Tensor,
    y_nN: Tensor,
) -> None:
    """Add each run's adapter, thin products of its rows alone, to the products of an expert's rows."""
    numbers = [] if run_of_n is None else run_of_n.unique().tolist()
    for number in numbers:
        adapter = None if number < 0 else of_runs[number]
        if adapter is None:
            continue
        at = (run_of_n == number).nonzero()[:, 0]
        e = 0 if adapter.is_shared else expert
        a_rK, b_Nr = (factor[e].to(y_nN.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
        low_nr = invariant.plain_linear(x_nK.index_select(0, at), a_rK, None, "torch")
        y_nN[at] += invariant.plain_linear(low_nr * adapter.scaling, b_Nr, None, "torch")


def _chunks(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    """Rows of each expert, at most `_CHUNK_ROWS` at a time."""
    for e, (first, stop) in enumerate(pairwise(bounds)):
        for start in range(first, stop, _CHUNK_ROWS):
            yield e, slice(start, min(start + _CHUNK_ROWS, stop))


def _without_rows(call: ExpertsCall) -> list[Tensor]:
    """H of every slice without rows, so that the backward recomputes it."""
    widths = [G * F for _, G, F, _ in (one.shape for one in call.experts.slices())]
    return [call.x_TD.new_empty(0, width) for width in widths]
