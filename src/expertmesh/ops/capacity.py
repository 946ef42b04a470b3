"""Sums with routing weights, and buffers of C rows per expert (E, C, D), for experts that do not weigh their rows.

`moe_mlp` needs neither: its experts apply the weights and take any number of rows. These are for expert modules that
want dense batches, and for padded exchanges whose sizes may not depend on the data.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.route_metadata import RouteMetadata, check_rows, check_tokens
from expertmesh.ops.transforms import refuse_second_derivative, refuse_transforms


def dispatch_capacity(
    x_TD: Tensor, metadata: RouteMetadata, capacity: int, *, backend: str = "auto"
) -> Tensor:
    """Copy tokens to buffers of C rows per expert; rows over the capacity are left out, the rest is zero.

    Args:
        x_TD: (T, D), any floating-point type.
        metadata: from `route_metadata`; an expert's first C rows, in slot order, get a place.
        capacity: C.
        backend: see `resolve_backend`.

    Returns:
        (E, C, D) in the type of x, differentiable. Does not synchronise.

    Raises:
        ConfigError: the capacity is below 1, E * C is 2**31 or more, or the metadata are of another number of tokens.

    Example:
        >>> maps = route_metadata(torch.tensor([[0], [0], [1]]), 2)
        >>> dispatch_capacity(torch.tensor([[1.0], [2.0], [3.0]]), maps, 1).flatten().tolist()
        [1.0, 3.0]
    """
    _check(metadata, capacity)
    check_tokens(x_TD, metadata)
    if resolve_backend(backend, x_TD.device, x_TD.dtype) == "triton":
        refuse_transforms("dispatch_capacity", lambda: [x_TD])
        return _fill_places(x_TD, *_maps(metadata), capacity)
    m = metadata
    first_E, end_E = m.offsets_E[:-1, None], m.offsets_E[1:, None]
    row_EC = first_E + torch.arange(capacity, device=x_TD.device)
    num_rows, num_tokens = m.token_of_row_N.shape[0], x_TD.shape[0]
    live_EC = (row_EC < end_E) & (row_EC < num_rows)
    # places without a row read a token of zeros behind the last one, which is there for T = 0 as well
    tokens = torch.nn.functional.pad(m.token_of_row_N, (0, 1), value=num_tokens)
    x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, 1))
    return x_TD[tokens[torch.where(live_EC, row_EC, num_rows)]]


def combine_capacity(
    y_ECD: Tensor,
    metadata: RouteMetadata,
    top_k: int,
    *,
    weights_TK: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sum each token's rows in the buffers that `dispatch_capacity` made, in FP32 and a fixed order.

    Args:
        y_ECD: (E, C, D).
        metadata: the metadata as given to `dispatch_capacity`.
        top_k: K.
        weights_TK: (T, K) factors of the rows, or None.
        backend: see `resolve_backend`.

    Returns:
        (T, D) in the type of y, differentiable (once with triton). Does not synchronise.

    Raises:
        ConfigError: the buffers or the weights do not fit the metadata, or E * C is 2**31 or more.

    Example:
        >>> maps = route_metadata(torch.tensor([[0], [0], [1]]), 2)
        >>> combine_capacity(torch.tensor([[[1.0]], [[3.0]]]), maps, 1).flatten().tolist()
        [1.0, 0.0, 3.0]
    """
    num_experts, capacity, dim = y_ECD.shape
    _check(metadata, capacity)
    if metadata.offsets_E.shape[0] != num_experts + 1:
        raise ConfigError(
            f"y has {num_experts} experts and metadata {metadata.offsets_E.shape[0] - 1}; they must be equal; check both"
        )
    _check_weights(weights_TK, metadata, top_k)
    y_RD = y_ECD.reshape(num_experts * capacity, dim)
    if resolve_backend(backend, y_ECD.device, y_ECD.dtype) == "triton":
        refuse_transforms("combine_capacity", lambda: [y_ECD, weights_TK])
        return _weighted_sum(y_RD, weights_TK, *_maps(metadata), top_k, capacity)
    places_N = _find_places(metadata, capacity)
    return _plain_sum(y_RD, weights_TK, places_N, num_experts * capacity, top_k)


def weighted_combine(
    y_RD: Tensor, metadata: RouteMetadata, weights_TK: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Sum each token's live rows times their routing weights, (R, D) -> (T, D), in FP32 and a fixed order.

    The plain sum, for rows that are weighted already, is `combine`.

    Args:
        y_RD: (R, D) rows in expert order; rows behind the last live one may hold anything.
        metadata: from `route_metadata`.
        weights_TK: (T, K) floating point.
        backend: see `resolve_backend`.

    Returns:
        (T, D) in the type of y, differentiable (once with triton). Does not synchronise.

    Raises:
        ConfigError: the rows or the weights do not fit the metadata.

    Example:
        >>> maps = route_metadata(torch.tensor([[1, 0]]), 2)
        >>> weighted_combine(torch.tensor([[2.0], [4.0]]), maps, torch.tensor([[0.25, 0.75]])).tolist()
        [[2.5]]
    """
    top_k = weights_TK.shape[1]
    check_rows(y_RD, metadata, top_k)
    _check_weights(weights_TK, metadata, top_k)
    if resolve_backend(backend, y_RD.device, y_RD.dtype) == "triton":
        refuse_transforms("weighted_combine", lambda: [y_RD, weights_TK])
        return _weighted_sum(y_RD, weights_TK, *_maps(metadata), top_k, None)
    return _plain_sum(y_RD, weights_TK, metadata.row_of_slot_N, metadata.offsets_E[-1], top_k)


def _check(metadata: RouteMetadata, capacity: int) -> None:
    num_experts = metadata.offsets_E.shape[0] - 1
    if capacity < 1 or num_experts * capacity >= 2**31:
        raise ConfigError(
            f"capacity is {capacity} with {num_experts} experts; it must be at least 1 and their product below 2**31; "
            "choose another"
        )


def _check_weights(weights_TK: Tensor | None, metadata: RouteMetadata, top_k: int) -> None:
    num_tokens = metadata.row_of_slot_N.shape[0] // top_k
    if weights_TK is not None and weights_TK.shape != (num_tokens, top_k):
        raise ConfigError(
            f"weights have shape {tuple(weights_TK.shape)}; it must be {(num_tokens, top_k)} with this metadata; check both"
        )


def _maps(metadata: RouteMetadata) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m = metadata
    return m.offsets_E, m.token_of_row_N, m.slot_of_row_N, m.row_of_slot_N


def _find_places(metadata: RouteMetadata, capacity: int) -> Tensor:
    """Row of every slot in the buffers seen as (E * C, D); E * C where it has none."""
    offsets_E, rows_N = metadata.offsets_E, metadata.row_of_slot_N
    num_experts = offsets_E.shape[0] - 1
    e_N = torch.searchsorted(offsets_E[1:], rows_N, right=True)
    place_N = e_N * capacity + rows_N - offsets_E[torch.clamp(e_N, max=num_experts - 1)]
    kept_N = (rows_N < offsets_E[-1]) & (place_N < (e_N + 1) * capacity)
    return torch.where(kept_N, place_N, num_experts * capacity)


def _plain_sum(
    y_RD: Tensor, weights_TK: Tensor | None, row_of_slot_N: Tensor, bound: Any, top_k: int
) -> Tensor:
    num_rows, dim = y_RD.shape
    num_tokens = row_of_slot_N.shape[0] // top_k
    live_N = row_of_slot_N < bound
    # dead slots read a row of zeros: those behind the last live one may hold anything, NaN too
    y_RD = torch.nn.functional.pad(y_RD, (0, 0, 0, 1))
    slots_ND = y_RD[torch.where(live_N, row_of_slot_N, num_rows)]
    slots_TKD = slots_ND.to(accumulate_dtype(y_RD.dtype)).view(num_tokens, top_k, dim)
    if weights_TK is not None:
        live_TK = live_N.view(num_tokens, top_k)
        slots_TKD = slots_TKD * torch.where(live_TK, weights_TK, 0).to(slots_TKD.dtype)[..., None]
    return slots_TKD.sum(1).to(y_RD.dtype)


@torch.library.custom_op("expertmesh::fill_places", mutates_args=())
def _fill_places(
    x_TD: Tensor,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    capacity: int,
) -> Tensor:
    from expertmesh.kernels import capacity as kernels

    return kernels.fill_places(x_TD, offsets_E, token_of_row_N, slot_of_row_N, capacity)


_fill_places.register_fake(
    lambda x, offsets, tokens, slots, rows, capacity: x.new_empty(
        offsets.shape[0] - 1, capacity, x.shape[1]
    )
)


@torch.library.custom_op("expertmesh::weighted_sum", mutates_args=())
def _weighted_sum(
    y_RD: Tensor,
    weights_TK: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    top_k: int,
    capacity: int | None,
) -> Tensor:
    from expertmesh.kernels import combine as kernels

    index_N, bound = _index_and_bound(offsets_E, row_of_slot_N, capacity)
    return kernels.sum_rows(y_RD, bound, index_N, top_k, weights_TK)


def _index_and_bound(
    offsets_E: Tensor, row_of_slot_N: Tensor, capacity: int | None
) -> tuple[Tensor, Tensor | int]:
    from expertmesh.kernels import capacity as kernels

    if capacity is None:
        return row_of_slot_N, offsets_E[-1:]
    places_N = kernels.find_places(offsets_E, row_of_slot_N, capacity)
    return places_N, (offsets_E.shape[0] - 1) * capacity


_weighted_sum.register_fake(
    lambda y, weights, offsets, tokens, slots, rows, top_k, capacity: y.new_empty(
        rows.shape[0] // top_k, y.shape[1]
    )
)


@torch.library.custom_op("expertmesh::weighted_sum_backward", mutates_args=())
def _weighted_sum_backward(
    grad_TD: Tensor,
    y_RD: Tensor,
    weights_TK: Tensor | None,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    top_k: int,
    capacity: int | None,
) -> tuple[Tensor, Tensor]:
    from expertmesh.kernels import capacity as capacity_kernels
    from expertmesh.kernels import combine, permute

    if capacity is None:
        num_rows = y_RD.shape[0]
        d_y = permute.tokens_to_rows(grad_TD, offsets_E, row_of_slot_N, num_rows, weights_TK)
    else:
        d_y = capacity_kernels.fill_places(
            grad_TD, offsets_E, token_of_row_N, slot_of_row_N, capacity, weights_TK
        ).view(y_RD.shape)
    if weights_TK is None:
        return d_y, grad_TD.new_empty(0)
    index_N, bound = _index_and_bound(offsets_E, row_of_slot_N, capacity)
    return d_y, combine.dot_rows(grad_TD, y_RD, bound, index_N, top_k, weights_TK.dtype)


_weighted_sum_backward.register_fake(
    lambda grad, y, weights, *rest: (
        torch.empty_like(y),
        grad.new_empty(0) if weights is None else torch.empty_like(weights),
    )
)


def _save_fill(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *maps, ctx.capacity = inputs
    ctx.save_for_backward(*maps)
    ctx.num_tokens = inputs[0].shape[0]


def _fill_backward(ctx: Any, grad_ECD: Tensor) -> tuple[Tensor | None, ...]:
    maps = ctx.saved_tensors  # read once: activation checkpointing lets nobody read them again
    num_slots = maps[3].shape[0]
    top_k = num_slots // ctx.num_tokens if ctx.num_tokens else 1
    grad_RD = grad_ECD.reshape(-1, grad_ECD.shape[2])
    return _weighted_sum(grad_RD, None, *maps, top_k, ctx.capacity), *(None,) * 5


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.top_k, ctx.capacity = inputs
    ctx.save_for_backward(*tensors)


def _sum_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    d_y, d_weights = _weighted_sum_backward(grad_TD, *saved, ctx.top_k, ctx.capacity)
    return d_y, None if saved[1] is None else d_weights, *(None,) * 6


_fill_places.register_autograd(_fill_backward, setup_context=_save_fill)
_weighted_sum.register_autograd(_sum_backward, setup_context=_save_sum)
refuse_second_derivative(
    _weighted_sum_backward,
    "a sum with weights or over capacity buffers with backend='triton'",
    fix="use backend='torch' where one is needed",
)
