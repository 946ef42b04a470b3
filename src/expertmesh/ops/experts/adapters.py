"""Experts with low-rank adapters: grouped products of the matrices and of the adapters.

Neither W + s B A nor the gradient of W is materialised, so adapters add only their own products and memory. If tokens
have different adapters, the experts' own products run over all tokens together, and each adapter is added to the rows
of its tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import activate
from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.experts import native
from expertmesh.ops.experts.adapted_linear import adapted_linear, low_rank
from expertmesh.ops.experts.call import AdapterRun, ExpertsCall, LowRank
from expertmesh.ops.experts.frozen_linear import frozen_linear
from expertmesh.ops.experts.grouped_linear import grouped_linear
from expertmesh.ops.experts.invariant import forward_of_runs as invariant_forward
from expertmesh.ops.experts.weighted_activation import weighted_activation
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import RouteMetadata, route_metadata

Times = Callable[[Tensor, ExpertSlice, Tensor | None, bool], Tensor]
"""Function ((R, K) rows sorted by expert, experts, (E, N) biases or None, whether of w_in) -> (R, N) adapted
products."""


def forward(call: ExpertsCall, buffers: list[Tensor]) -> Tensor:
    """Compute `moe_mlp` with adapters, (T, D), differentiable if all tokens share them; `buffers` is not read."""
    if call.runs:
        return _forward_of_runs(call)
    assert call.maps is not None and call.adapters is not None
    for adapter in call.adapters:
        if adapter is not None and not adapter.is_shared:
            _check(adapter, call.experts.num_experts)
    if call.batch_invariant:
        factors = [t for one in call.adapters if one is not None for t in one[:2]]
        y_TD: Tensor = _Invariant.apply(call, *call.differentiable, *factors)
        return y_TD
    return _forward_of_all(call)


def _forward_of_all(call: ExpertsCall) -> Tensor:
    """Compute `moe_mlp` where all tokens have the same adapters."""
    assert call.maps is not None and call.adapters is not None
    how: dict[str, Any] = {"offsets_E": call.maps.offsets_E, "backend": call.backend}
    on_in, on_out = (partial(_times, adapter, **how) for adapter in call.adapters)
    return _between(call, on_in, on_out)


class _Invariant(torch.autograd.Function):
    """Batch-invariant sums; the backward computes the call again by ordinary ones, whose gradients it returns."""

    @staticmethod
    def forward(ctx: Any, call: ExpertsCall, *tensors: Tensor) -> Tensor:
        assert call.adapters is not None
        ctx.call = call
        ctx.save_for_backward(*tensors)
        run = AdapterRun(0, len(call.x_TD), *call.adapters)
        return invariant_forward(call._replace(adapters=None, runs=(run,)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad(), without_autocast(grad_TD.device):
            y_TD = _forward_of_all(_with_tensors(ctx.call, leaves))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(y_TD, wanted, grad_TD, materialize_grads=True))
        return None, *(next(found) if need else None for need in needs)


def _with_tensors(call: ExpertsCall, tensors: Sequence[Tensor]) -> ExpertsCall:
    """A call with other values of `differentiable` and of the factors of its adapters, in this order."""
    assert call.adapters is not None
    x_TD, weights_TK, *rest = tensors
    count = len(call.experts.parameters)
    factors = iter(rest[count:])
    adapters = [
        None if one is None else one._replace(a_ErK=next(factors), b_ENr=next(factors)) for one in call.adapters
    ]
    return call._replace(
        x_TD=x_TD,
        weights_TK=weights_TK,
        experts=call.experts.with_parameters(rest[:count]),
        adapters=(adapters[0], adapters[1]),
        batch_invariant=False,
    )


def _forward_of_runs(call: ExpertsCall) -> Tensor:
    """Compute `moe_mlp` where tokens have different adapters or none: (T, D), not differentiable; does not
    synchronise."""
    assert call.maps is not None
    if call.batch_invariant:
        return _forward_of_runs_invariant(call)
    rows = [_rows_of(run, call.maps, call.weights_TK.shape[1]) for run in call.runs]
    how: dict[str, Any] = {"offsets_E": call.maps.offsets_E, "backend": call.backend}
    on_in, on_out = (
        partial(_times_of_runs, list(zip(rows, each, strict=True)), **how)
        for each in ([run.on_in for run in call.runs], [run.on_out for run in call.runs])
    )
    return _between(call, on_in, on_out)


def _forward_of_runs_invariant(call: ExpertsCall) -> Tensor:
    """Compute `forward_of_runs` with batch-invariant sums; tokens without adapters get the bits of a call without
    runs."""
    maps, bare = call.maps, call._replace(runs=())
    assert maps is not None
    if not native.serves_rows(bare):
        return invariant_forward(call)
    E = call.experts.num_experts
    ids_TK = native.ids_of(maps, call.weights_TK.shape)
    has_T1 = torch.zeros(len(ids_TK), 1, dtype=torch.bool, device=ids_TK.device)
    for run in call.runs:
        if run.on_in is not None or run.on_out is not None:
            has_T1[run.first : run.stop] = True
    with_TK, without_TK = ids_TK.masked_fill(~has_T1, E), ids_TK.masked_fill(has_T1, E)
    y_TD, _ = native.forward_of_rows(bare._replace(maps=route_metadata(without_TK, E)), save_h=False)
    return torch.where(has_T1, invariant_forward(call._replace(maps=route_metadata(with_TK, E))), y_TD)


def _between(call: ExpertsCall, on_in: Times, on_out: Times) -> Tensor:
    """Compute `moe_mlp`, (T, D), with the given functions for the two products."""
    metadata, backend = call.maps, call.backend
    assert metadata is not None
    # quantised experts are never cut into slices, and stay as they are
    is_dense = call.experts.format == "dense"
    one = call.experts.joined(call.x_TD.dtype) if is_dense else call.experts.slices()[0]
    x_RD = permute(call.x_TD, metadata, backend=backend)
    bias = None if one.b_in_EGF is None else one.b_in_EGF.flatten(1)
    h_RN = on_in(x_RD, one, bias, True)
    s_R = call.weights_TK.reshape(-1).index_select(0, metadata.slot_of_row_N)
    if one.b_out_ED is None:
        a_RF = weighted_activation(h_RN, s_R, activation=one.activation)
        y_RD = on_out(a_RF, one, None, False)
    else:
        _, G, width, _ = one.shape
        a_RF = activate(h_RN.unflatten(1, (G, width)), one.activation)
        y_RD = on_out(a_RF, one, one.b_out_ED, False)
        y_RD = (y_RD * s_R[:, None]).to(y_RD.dtype)
    return combine(y_RD, metadata, call.weights_TK.shape[1], backend=backend)


def _check(adapter: LowRank, num_experts: int) -> None:
    here = adapter.a_ErK.shape[0]
    if here != num_experts:
        raise ConfigError(
            f"adapters of {here} experts and weights of {num_experts}: weights are gathered, and adapters are not; "
            "leave route_degree out, so that tokens are dispatched to all ranks"
        )


def _times(
    adapter: LowRank | None,
    x_RK: Tensor,
    experts: ExpertSlice,
    b_EN: Tensor | None,
    is_in: bool,
    **how: Any,
) -> Tensor:
    """Multiply (R, K) rows sorted by expert by the adapted matrices: (R, N)."""
    if adapter is None or adapter.is_shared or experts.format != "dense":
        y_RN = _base(x_RK, experts, b_EN, is_in, **how)
        return y_RN if adapter is None else y_RN + _added(x_RK, adapter, **how)
    a, b = (factor.to(x_RK.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    w_ENK = _dense(experts, is_in)
    return adapted_linear(x_RK, w_ENK, a_ErK=a, b_ENr=b, scaling=adapter.scaling, bias_EN=b_EN, **how)


def _dense(experts: ExpertSlice, is_in: bool) -> Tensor:
    return experts.w_in_EGFD.flatten(1, 2) if is_in else experts.w_out_EDF


def _base(x_RK: Tensor, experts: ExpertSlice, b_EN: Tensor | None, is_in: bool, **how: Any) -> Tensor:
    """Multiply rows by the matrices without adapters."""
    if experts.format == "dense":
        return grouped_linear(x_RK, _dense(experts, is_in), b_EN=b_EN, **how)
    return frozen_linear(x_RK, experts, how["offsets_E"], is_in=is_in, b_EN=b_EN)


def _added(x_RK: Tensor, adapter: LowRank, **how: Any) -> Tensor:
    """Multiply rows by s B A of their experts."""
    a, b = (factor.to(x_RK.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    if adapter.is_shared:
        return F.linear(F.linear(x_RK, a[0]), b[0] * adapter.scaling)
    return low_rank(x_RK, a_ErK=a, b_ENr=b, scaling=adapter.scaling, **how)


class _Rows(NamedTuple):
    """Rows of an adapter run's tokens, as indices into all rows, and the first of them for each expert."""

    index_n: Tensor
    offsets_E: Tensor


def _rows_of(run: AdapterRun, maps: RouteMetadata, top_k: int) -> _Rows:
    index_n = maps.row_of_slot_N[run.first * top_k : run.stop * top_k].sort().values
    offsets_E = torch.searchsorted(index_n, maps.offsets_E, out_int32=True)
    # slots without an expert lie behind all rows; their products are zeros, so they may be added to any row
    return _Rows(index_n.clamp(max=max(len(maps.token_of_row_N) - 1, 0)), offsets_E)


def _times_of_runs(
    runs: list[tuple[_Rows, LowRank | None]],
    x_RK: Tensor,
    experts: ExpertSlice,
    b_EN: Tensor | None,
    is_in: bool,
    **how: Any,
) -> Tensor:
    """Multiply as `_times` does, each run's rows with its own adapter."""
    y_RN = _base(x_RK, experts, b_EN, is_in, **how)
    for rows, adapter in runs:
        if adapter is not None and len(rows.index_n):
            own = {**how, "offsets_E": rows.offsets_E}
            y_RN.index_add_(0, rows.index_n, _added(x_RK[rows.index_n], adapter, **own))
    return y_RN
