"""Batch-invariant experts: a token's result is bitwise the same in every batch.

Made for inference, but differentiable once, by the backward of the other backends, which recomputes H. Slices are
concatenated by a copy. Without Triton it synchronises with a GPU to read the offsets.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from expertmesh.ops.activation import inner_name
from expertmesh.ops.dtypes import gemm_dtype
from expertmesh.ops.experts import triton_backend
from expertmesh.ops.experts.call import ExpertsCall, LowRank
from expertmesh.ops.experts.torch_forward import row_weights
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.invariant.operators import BlockProduct
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
    """Compute y (T, D) expert by expert, with rows in blocks of one shape; H has no rows."""
    return forward_of_runs(call), _without_rows(call)


def forward_of_runs(call: ExpertsCall) -> Tensor:
    """Compute y (T, D) with each token's adapters; rows without adapters get the bits of `forward`."""
    x_TD, weights_TK, maps = call.x_TD, call.weights_TK, call.maps
    assert maps is not None
    dtype = gemm_dtype(x_TD.device, x_TD.dtype)
    experts = call.experts.joined(dtype)
    bounds = maps.offsets_E.tolist()
    y_RD = x_TD.new_empty(bounds[-1], x_TD.shape[1], dtype=dtype)
    s_R1 = row_weights(weights_TK, maps, bounds[-1], x_TD.dtype)[:, None]
    run_of_T = _run_of_tokens(call)
    for pieces in _pieces(bounds):
        rows = slice(pieces[0][1], pieces[-1][2])
        _multiply(
            x_TD,
            maps.token_of_row_N[rows],
            s_R1[rows],
            experts,
            pieces,
            y_RD[rows],
            call=call,
            run_of_T=run_of_T,
        )
    y_TD = sum_rows_in_order(y_RD, maps.offsets_E, maps.row_of_slot_N, weights_TK.shape[1])
    return y_TD.to(x_TD.dtype)


def _run_of_tokens(call: ExpertsCall) -> Tensor | None:
    """(T,) index of each token's adapter run, -1 without one; None without runs."""
    if not call.runs:
        return None
    run_of_T = torch.full((len(call.x_TD),), -1, device=call.x_TD.device)
    for number, run in enumerate(call.runs):
        run_of_T[run.first : run.stop] = number
    return run_of_T


class _LowRanks:
    """Adapters of rows that may have different ones.

    Args:
        of_runs: the adapter of each run.
        run_of_R: the run of each row, -1 without one; None: no row has an adapter.
    """

    def __init__(self, of_runs: Sequence[LowRank | None], run_of_R: Tensor | None) -> None:
        self._of_runs, self._run_of_R = of_runs, run_of_R

    def add(self, expert: int, rows: slice, x_RK: Tensor, y_RN: Tensor) -> None:
        """Add the adapters' products to the products of one expert's rows; each row's sum is independent of the others."""
        if self._run_of_R is None:
            return
        run_of_n, x, y = self._run_of_R[rows], x_RK[rows], y_RN[rows]
        for number in run_of_n.unique().tolist():
            adapter = None if number < 0 else self._of_runs[number]
            if adapter is None:
                continue
            at = (run_of_n == number).nonzero()[:, 0]
            a_rK, b_Nr = (factor[expert].to(y.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
            own = x.index_select(0, at)
            low_nr = BlockProduct.of(a_rK).into(own, y.new_empty(len(at), len(a_rK)))
            more_nN = BlockProduct.of(b_Nr).into(
                low_nr * adapter.scaling, y.new_empty(len(at), len(b_Nr))
            )
            y[at] = y[at] + more_nN


def _pieces(bounds: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of (expert, first row, last row + 1), each of at most `_CHUNK_ROWS` rows."""
    found: list[tuple[int, int, int]] = []
    for e, (first, end) in enumerate(pairwise(bounds)):
        while first < end:
            began = found[0][1] if found else first
            stop = min(end, began + _CHUNK_ROWS)
            found.append((e, first, stop))
            first = stop
            if stop == began + _CHUNK_ROWS:
                yield found
                found = []
    if found:
        yield found


def _multiply(
    x_TD: Tensor,
    token_of_row_R: Tensor,
    s_R1: Tensor,
    experts: ExpertSlice,
    pieces: list[tuple[int, int, int]],
    y_RD: Tensor,
    *,
    call: ExpertsCall,
    run_of_T: Tensor | None,
) -> None:
    """Write s * act(x W_in^T + b_in) W_out^T + s b_out of sorted rows; H is rounded to the dtype of y."""
    _, G, F, D = experts.shape
    dtype, b_EGF = y_RD.dtype, experts.b_in_EGF
    biases = [None if b_EGF is None else b_EGF[e].flatten().to(dtype) for e, _, _ in pieces]
    ins = [
        BlockProduct.of(experts.w_in(e, dtype), b_H)
        for (e, _, _), b_H in zip(pieces, biases, strict=True)
    ]
    outs = [BlockProduct.of(experts.w_out(e, dtype)) for e, _, _ in pieces]
    counts = [stop - first for _, first, stop in pieces]
    sizes = [
        max(count, a.rows.least, b.rows.least)
        for count, a, b in zip(counts, ins, outs, strict=True)
    ]
    # each expert gets at least as many rows as its product takes; missing rows repeat another one
    places = _spread(counts, sizes)
    if places is not None:
        source = torch.tensor(places[0], device=x_TD.device)
        token_of_row_R, s_R1 = token_of_row_R[source], s_R1[source]
    x_RD = x_TD.index_select(0, token_of_row_R).to(dtype)
    run_of_R = None if run_of_T is None else run_of_T[token_of_row_R]
    on_in = _LowRanks([run.on_in for run in call.runs], run_of_R)
    on_out = _LowRanks([run.on_out for run in call.runs], run_of_R)
    ends = list(accumulate(sizes))
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    h_RH = x_RD.new_empty(x_RD.shape[0], G * F)
    for (e, _, _), block, rows in zip(pieces, ins, slices, strict=True):
        block.into(x_RD[rows], h_RH[rows])
        on_in.add(e, rows, x_RD, h_RH)
    h_RGF = h_RH.to(s_R1.dtype).unflatten(1, (G, F))
    a_RF = (invariant.activate(h_RGF, inner_name(experts.activation)) * s_R1).to(dtype)
    own_RD = y_RD if places is None else x_RD.new_empty(x_RD.shape[0], D)
    for (e, _, _), block, rows in zip(pieces, outs, slices, strict=True):
        block.into(a_RF[rows], own_RD[rows])
        on_out.add(e, rows, a_RF, own_RD)
        if experts.b_out_ED is not None:
            own_RD[rows] += s_R1[rows] * experts.b_out_ED[e]
    if places is not None:
        torch.index_select(own_RD, 0, torch.tensor(places[1], device=y_RD.device), out=y_RD)


def _spread(counts: list[int], sizes: list[int]) -> tuple[list[int], list[int]] | None:
    """Map between rows and padded places: the row of each place, and the place of each row; None without padding."""
    if counts == sizes:
        return None
    rows: list[int] = []
    places: list[int] = []
    first = 0
    for count, size in zip(counts, sizes, strict=True):
        places += range(len(rows), len(rows) + count)
        rows += [*range(first, first + count), *[first] * (size - count)]
        first += count
    return rows, places


def _without_rows(call: ExpertsCall) -> list[Tensor]:
    """H of every slice without rows, so that the backward recomputes it."""
    widths = [G * F for _, G, F, _ in (one.shape for one in call.experts.slices())]
    return [call.x_TD.new_empty(0, width) for width in widths]
