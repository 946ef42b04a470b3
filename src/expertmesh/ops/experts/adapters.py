"""Experts with low-rank adapters, and quantised ones on a GPU: grouped products of the matrices and of the adapters.

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
from expertmesh.ops import triton_linear
from expertmesh.ops.activation import activate
from expertmesh.ops.backend import uses_triton
from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.experts import native, quantized_triton
from expertmesh.ops.experts.adapted_linear import adapted_linear
from expertmesh.ops.experts.call import ExpertsCall, LowRank, TokenAdapters
from expertmesh.ops.experts.frozen_linear import frozen_linear
from expertmesh.ops.experts.grouped_linear import grouped_linear
from expertmesh.ops.experts.invariant import forward_of_tokens as invariant_forward
from expertmesh.ops.experts.invariant import forward_triton
from expertmesh.ops.experts.invariant import low_rank as invariant_low_rank
from expertmesh.ops.experts.weighted_activation import weighted_activation
from expertmesh.ops.experts.weights import ExpertSlice
from expertmesh.ops.invariant.operators import plain_linear
from expertmesh.ops.permute import combine, permute
from expertmesh.ops.route_metadata import route_metadata

Times = Callable[[Tensor, ExpertSlice, Tensor | None, bool], Tensor]
"""Function ((R, K) rows sorted by expert, experts, (E, N) biases or None, whether of w_in) -> (R, N) adapted
products."""


def serves(call: ExpertsCall) -> bool:
    """Whether `forward` computes this call."""
    by_triton = call.backend == "triton" and call.experts.format != "dense"
    return call.maps is not None and (call.has_adapters or by_triton)


def forward(call: ExpertsCall, buffers: list[Tensor]) -> Tensor:
    """Compute `moe_mlp` with adapters, (T, D), differentiable if all tokens share them; `buffers` is not read."""
    if call.of_tokens is not None:
        return _forward_of_tokens(call)
    call = call._replace(adapters=call.adapters or (None, None))
    assert call.adapters is not None
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
    on_in, on_out = (partial(_times, adapter, how=_Products.of(call)) for adapter in call.adapters)
    return _between(call, on_in, on_out)


class _Invariant(torch.autograd.Function):
    """Batch-invariant sums; the backward computes the call again by ordinary ones, whose gradients it returns."""

    @staticmethod
    def forward(ctx: Any, call: ExpertsCall, *tensors: Tensor) -> Tensor:
        assert call.adapters is not None
        ctx.call = call
        ctx.save_for_backward(*tensors)
        if call.backend == "triton":
            return _forward_of_all(call)
        all_T = torch.arange(len(call.x_TD), device=call.x_TD.device)
        own = TokenAdapters(torch.zeros_like(all_T), all_T, *call.adapters)
        return invariant_forward(call._replace(adapters=None, of_tokens=own))

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


def _forward_of_tokens(call: ExpertsCall) -> Tensor:
    """Compute `moe_mlp` where tokens have different adapters or none: (T, D), not differentiable; does not
    synchronise."""
    assert call.of_tokens is not None
    return _forward_of_tokens_invariant(call) if call.batch_invariant else _forward_of_rows(call)


def _forward_of_rows(call: ExpertsCall) -> Tensor:
    own = call.of_tokens
    assert own is not None
    rows, how = _rows_of(own, call), _Products.of(call)
    on_in, on_out = (partial(_times_of_rows, one, rows, how=how) for one in (own.on_in, own.on_out))
    return _between(call, on_in, on_out)


def _forward_of_tokens_invariant(call: ExpertsCall) -> Tensor:
    """Compute `forward_of_tokens` with batch-invariant sums; tokens without adapters get the bits of a call without
    them."""
    maps, own, bare = call.maps, call.of_tokens, call._replace(of_tokens=None)
    assert maps is not None and own is not None
    by_triton = call.backend == "triton"
    if not by_triton and not native.serves_rows(bare):
        return invariant_forward(call)
    if by_triton and call.experts.format != "dense":
        return _forward_of_rows(call)
    E = call.experts.num_experts
    ids_TK = native.ids_of(maps, call.weights_TK.shape)
    has_T1 = own.slot_T[:, None] >= 0
    with_TK, without_TK = ids_TK.masked_fill(~has_T1, E), ids_TK.masked_fill(has_T1, E)
    adapted, bare = (
        one._replace(maps=route_metadata(ids_TK, E, backend=call.backend))
        for one, ids_TK in ((call, with_TK), (bare, without_TK))
    )
    if by_triton:
        return torch.where(has_T1, _forward_of_rows(adapted), forward_triton(bare)[0])
    return torch.where(has_T1, invariant_forward(adapted), native.forward_of_rows(bare, save_h=False)[0])


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
        a_RF = weighted_activation(h_RN, s_R, activation=one.activation, backend=backend)
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


class _Products(NamedTuple):
    """Rows of each matrix, and how products of sorted rows are computed."""

    offsets_E: Tensor
    backend: str
    batch_invariant: bool  # by tiles that do not depend on the rows; with Triton only, not differentiable

    @classmethod
    def of(cls, call: ExpertsCall) -> "_Products":
        assert call.maps is not None
        return cls(call.maps.offsets_E, call.backend, call.batch_invariant)

    def linear(self, x_RK: Tensor, w_ENK: Tensor, b_EN: Tensor | None = None) -> Tensor:
        if self.batch_invariant:
            return triton_linear.forward(x_RK, w_ENK, self.offsets_E, b_EN, transposed=False, batch_invariant=True)
        return grouped_linear(x_RK, w_ENK, self.offsets_E, b_EN=b_EN, backend=self.backend)


def _times(
    adapter: LowRank | None, x_RK: Tensor, experts: ExpertSlice, b_EN: Tensor | None, is_in: bool, *, how: _Products
) -> Tensor:
    """Multiply (R, K) rows sorted by expert by the adapted matrices: (R, N)."""
    if adapter is None or adapter.is_shared or experts.format != "dense" or how.batch_invariant:
        y_RN = _base(x_RK, experts, b_EN, is_in, how)
        return y_RN if adapter is None else y_RN + _added(x_RK, adapter, how)
    a, b = (factor.to(x_RK.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    w_ENK, scaling = _dense(experts, is_in), adapter.scaling
    return adapted_linear(x_RK, w_ENK, how.offsets_E, a, b, scaling, bias_EN=b_EN, backend=how.backend)


def _dense(experts: ExpertSlice, is_in: bool) -> Tensor:
    return experts.w_in_EGFD.flatten(1, 2) if is_in else experts.w_out_EDF


def _base(x_RK: Tensor, experts: ExpertSlice, b_EN: Tensor | None, is_in: bool, how: _Products) -> Tensor:
    """Multiply rows by the matrices without adapters."""
    if experts.format == "dense":
        return how.linear(x_RK, _dense(experts, is_in), b_EN)
    if how.batch_invariant:
        return quantized_triton.linear(x_RK, experts, how.offsets_E, b_EN, is_in=is_in, batch_invariant=True)
    return frozen_linear(x_RK, experts, how.offsets_E, is_in=is_in, b_EN=b_EN, backend=how.backend)


def _added(x_RK: Tensor, adapter: LowRank, how: _Products) -> Tensor:
    """Multiply rows by s B A of their experts."""
    a, b = (factor.to(x_RK.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    if not adapter.is_shared:
        return how.linear(how.linear(x_RK, a) * adapter.scaling, b)
    if how.batch_invariant:
        return plain_linear(plain_linear(x_RK, a[0], None, "triton"), b[0] * adapter.scaling, None, "triton")
    return F.linear(F.linear(x_RK, a[0]), b[0] * adapter.scaling)


class _Rows(NamedTuple):
    """Rows with an adapter, as indices into all rows, sorted by its matrices; the first of them for each matrix."""

    index_n: Tensor
    offsets_G: Tensor


def _rows_of(own: TokenAdapters, call: ExpertsCall) -> _Rows:
    maps, top_k = call.maps, call.weights_TK.shape[1]
    assert maps is not None
    E, num_matrices = (
        call.experts.num_experts,
        max(len(one.a_ErK) for one in (own.on_in, own.on_out) if one is not None),
    )
    row_n = maps.row_of_slot_N.view(-1, top_k)[own.tokens_n].flatten()
    expert_n = torch.searchsorted(maps.offsets_E, row_n, right=True) - 1
    matrix_n = own.slot_T[own.tokens_n].repeat_interleave(top_k) * E + expert_n
    # slots without an expert lie behind all rows; their products are zeros, so they may be added to any row
    matrix_n = torch.where(expert_n < E, matrix_n, num_matrices)
    sorted_n, order_n = matrix_n.sort(stable=True)
    bounds_G = torch.arange(num_matrices + 1, device=sorted_n.device)
    last = max(len(maps.token_of_row_N) - 1, 0)
    return _Rows(row_n[order_n].clamp(max=last), torch.searchsorted(sorted_n, bounds_G, out_int32=True))


def _times_of_rows(
    adapter: LowRank | None,
    rows: _Rows,
    x_RK: Tensor,
    experts: ExpertSlice,
    b_EN: Tensor | None,
    is_in: bool,
    *,
    how: _Products,
) -> Tensor:
    """Multiply as `_times` does, some rows with their own adapter."""
    y_RN = _base(x_RK, experts, b_EN, is_in, how)
    if adapter is not None and len(y_RN):
        own = how._replace(offsets_E=rows.offsets_G)
        y_RN.index_add_(0, rows.index_n, _added(x_RK[rows.index_n], adapter, own))
    return y_RN


def add_of_tokens(y_TN: Tensor, x_TK: Tensor, own: TokenAdapters, *, batch_invariant: bool, backend: str) -> None:
    """Add the adapters of tokens to their products with one matrix, in place; not differentiable."""
    assert own.on_in is not None
    x_nK, slot_n = x_TK[own.tokens_n], own.slot_T[own.tokens_n]
    if batch_invariant and not uses_triton(backend, x_TK.device, x_TK.dtype):
        z_nN = invariant_low_rank(x_nK, own.on_in, slot_n, y_TN.dtype)
    else:
        bounds_A = torch.arange(len(own.on_in.a_ErK) + 1, device=slot_n.device)
        offsets_A = torch.searchsorted(slot_n, bounds_A, out_int32=True)
        z_nN = _added(x_nK, own.on_in, _Products(offsets_A, backend, batch_invariant))
    y_TN.index_add_(0, own.tokens_n, z_nN)
