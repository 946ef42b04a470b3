"""Movement of rows between token order and expert order, and the sum per token."""

from typing import Any

import torch
from torch import Tensor

from expertmesh.ops import reference
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.route_metadata import RouteMetadata, check_rows, check_tokens
from expertmesh.ops.transforms import refuse_transforms


def permute(x_TD: Tensor, metadata: RouteMetadata, *, backend: str = "auto") -> Tensor:
    """Copy tokens (T, D) to rows in expert order (R, D); rows behind the last live one are zero.

    Differentiable any number of times; no host synchronisation on a GPU. Raises ConfigError if the metadata have
    another number of tokens.

    Example:
        >>> x_TD = torch.tensor([[1.0], [2.0]])
        >>> permute(x_TD, route_metadata(torch.tensor([[1], [0]]), 2)).tolist()
        [[2.0], [1.0]]
    """
    check_tokens(x_TD, metadata)
    m, name = metadata, resolve_backend(backend, x_TD.device, x_TD.dtype)
    if name == "reference":
        return reference.gather_rows(x_TD, m.token_of_row_N, int(m.offsets_E[-1]))
    refuse_transforms("permute", lambda: [x_TD])
    return _tokens_to_rows(x_TD, m.offsets_E, m.token_of_row_N, m.row_of_slot_N, name)


def unpermute(y_RD: Tensor, metadata: RouteMetadata, top_k: int, *, backend: str = "auto") -> Tensor:
    """Copy rows in expert order (R, D) to slots (T, K, D); dead slots are zero. Differentiable any number of times.

    Raises ConfigError if the metadata have another number of rows.

    Example:
        >>> maps = route_metadata(torch.tensor([[1], [0]]), 2)
        >>> unpermute(torch.tensor([[2.0], [1.0]]), maps, 1).tolist()
        [[[1.0]], [[2.0]]]
    """
    check_rows(y_RD, metadata, top_k)
    m, name = metadata, resolve_backend(backend, y_RD.device, y_RD.dtype)
    if name == "reference":
        slots_ND = reference.rows_to_slots(y_RD, m.row_of_slot_N, int(m.offsets_E[-1]))
    else:
        refuse_transforms("unpermute", lambda: [y_RD])
        slots_ND = _rows_to_slots(y_RD, m.offsets_E, m.slot_of_row_N, m.row_of_slot_N, name)
    return slots_ND.view(slots_ND.shape[0] // top_k, top_k, y_RD.shape[1])


def combine(y_RD: Tensor, metadata: RouteMetadata, top_k: int, *, backend: str = "auto") -> Tensor:
    """Sum each token's live rows, (R, D) -> (T, D), in FP32 (FP64 for FP64) and a fixed order.

    Differentiable any number of times; bitwise deterministic. Raises ConfigError if the metadata have another number of
    rows.

    Example:
        >>> maps = route_metadata(torch.tensor([[1, 0]]), 2)
        >>> combine(torch.tensor([[2.0], [1.0]]), maps, 2).tolist()
        [[3.0]]
    """
    check_rows(y_RD, metadata, top_k)
    m, name = metadata, resolve_backend(backend, y_RD.device, y_RD.dtype)
    if name == "reference":
        return reference.combine(y_RD, m.row_of_slot_N, int(m.offsets_E[-1]), top_k)
    refuse_transforms("combine", lambda: [y_RD])
    return _sum_rows(y_RD, m.offsets_E, m.token_of_row_N, m.row_of_slot_N, top_k, name)


@torch.library.custom_op("expertmesh::tokens_to_rows", mutates_args=())
def _tokens_to_rows(
    x_TD: Tensor,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    backend: str,
) -> Tensor:
    if backend == "triton":
        from expertmesh.kernels import permute as kernels

        return kernels.tokens_to_rows(x_TD, offsets_E, row_of_slot_N, token_of_row_N.shape[0])
    if x_TD.device.type == "cpu":
        out = x_TD.new_empty(token_of_row_N.shape[0], x_TD.shape[1])
        num_live = int(offsets_E[-1])
        torch.index_select(x_TD.contiguous(), 0, token_of_row_N[:num_live], out=out[:num_live])
        out[num_live:].zero_()
        return out
    live = torch.arange(token_of_row_N.shape[0], device=x_TD.device) < offsets_E[-1]
    return torch.where(live[:, None], x_TD[token_of_row_N], 0)


_tokens_to_rows.register_fake(lambda x, offsets, tokens, slots, backend: x.new_empty(tokens.shape[0], x.shape[1]))


def sum_rows(y_RD: Tensor, offsets_E: Tensor, row_of_slot_N: Tensor, top_k: int) -> Tensor:
    """Sum each token's live rows in FP32 (FP64 for FP64), in slot order; not seen by autograd."""
    num_tokens = row_of_slot_N.shape[0] // top_k
    if y_RD.shape[0] == 0 or num_tokens == 0:
        return y_RD.new_zeros(num_tokens, y_RD.shape[1])
    if y_RD.device.type == "cpu":
        return _sum_rows_in_bags(y_RD, int(offsets_E[-1]), row_of_slot_N, top_k)
    return sum_rows_in_order(y_RD, offsets_E, row_of_slot_N, top_k)


def sum_rows_in_order(y_RD: Tensor, offsets_E: Tensor, row_of_slot_N: Tensor, top_k: int) -> Tensor:
    """Compute `sum_rows` by additions that are rounded to even at the end, as every implementation can do it to the
    bit."""
    num_tokens = row_of_slot_N.shape[0] // top_k
    if y_RD.shape[0] == 0 or num_tokens == 0:
        return y_RD.new_zeros(num_tokens, y_RD.shape[1])
    index_TK = row_of_slot_N.view(num_tokens, top_k)
    live_TK = index_TK < offsets_E[-1]
    index_TK = torch.where(live_TK, index_TK, 0)
    out = y_RD.new_zeros(num_tokens, y_RD.shape[1], dtype=accumulate_dtype(y_RD.dtype))
    for j in range(top_k):
        # where, not a product with 0, because rows behind the last live one may be NaN
        out += torch.where(live_TK[:, j, None], y_RD[index_TK[:, j]], 0)
    return out.to(y_RD.dtype)


def _sum_rows_in_bags(y_RD: Tensor, num_live: int, row_of_slot_N: Tensor, top_k: int) -> Tensor:
    # An embedding bag computes this sum in one pass with FP32 sums on all threads, 3 to 10 times as fast as gathers and
    # adds.
    num_slots = row_of_slot_N.shape[0]
    if num_live == num_slots:
        starts_T = torch.arange(0, num_slots, top_k, dtype=torch.int32, device=y_RD.device)
        rows = row_of_slot_N
    else:
        live_N = row_of_slot_N < num_live
        rows = row_of_slot_N[live_N]
        counts_T = live_N.view(-1, top_k).sum(1, dtype=torch.int32)
        starts_T = counts_T.cumsum(0, dtype=torch.int32) - counts_T
    return torch.nn.functional.embedding_bag(rows, y_RD, starts_T, mode="sum")


@torch.library.custom_op("expertmesh::sum_rows", mutates_args=())
def _sum_rows(
    y_RD: Tensor,
    offsets_E: Tensor,
    token_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    top_k: int,
    backend: str,
) -> Tensor:
    if backend == "triton":
        from expertmesh.kernels import combine as kernels

        return kernels.sum_rows(y_RD, offsets_E[-1:], row_of_slot_N, top_k)
    return sum_rows(y_RD, offsets_E, row_of_slot_N, top_k)


_sum_rows.register_fake(
    lambda y, offsets, tokens, rows, top_k, backend: y.new_empty(rows.shape[0] // top_k, y.shape[1])
)


@torch.library.custom_op("expertmesh::rows_to_slots", mutates_args=())
def _rows_to_slots(
    y_RD: Tensor,
    offsets_E: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_N: Tensor,
    backend: str,
) -> Tensor:
    if backend == "triton":
        from expertmesh.kernels import permute as kernels

        return kernels.rows_to_slots(y_RD, offsets_E, row_of_slot_N)
    live = row_of_slot_N < offsets_E[-1]
    if y_RD.shape[0] == 0:
        return y_RD.new_zeros(row_of_slot_N.shape[0], y_RD.shape[1])
    return torch.where(live[:, None], y_RD[torch.where(live, row_of_slot_N, 0)], 0)


_rows_to_slots.register_fake(lambda y, offsets, slots, rows, backend: y.new_empty(rows.shape[0], y.shape[1]))


# Each copy is the transpose of another one, so they are each other's gradients, to any order.


def _save_maps(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, *maps, ctx.backend = inputs
    ctx.save_for_backward(*(m for m in maps if isinstance(m, Tensor)))
    ctx.num_slots = maps[2].shape[0]
    ctx.num_tokens = values.shape[0]


def _tokens_to_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    top_k = ctx.num_slots // ctx.num_tokens if ctx.num_tokens else 1
    return _sum_rows(grad, *ctx.saved_tensors, top_k, ctx.backend), *(None,) * 4


def _sum_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _tokens_to_rows(grad, *ctx.saved_tensors, ctx.backend), *(None,) * 5


def _rows_to_slots_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # a slot is a token with one choice, so the slot of a row is its token
    return _tokens_to_rows(grad, *ctx.saved_tensors, ctx.backend), *(None,) * 4


_tokens_to_rows.register_autograd(_tokens_to_rows_backward, setup_context=_save_maps)
_sum_rows.register_autograd(_sum_rows_backward, setup_context=_save_maps)
_rows_to_slots.register_autograd(_rows_to_slots_backward, setup_context=_save_maps)
