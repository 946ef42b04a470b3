"""The experts on a CPU for so few rows that calls cost as much as products: what generating text token by token needs.

The steps and their rounding are those of `expert_loop`, but the rows are ordered in Python from one list of the ids, and
one token's rows stay in the order of its choices, so that nothing is gathered at all.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from expertmesh.errors import ConfigError
from expertmesh.ops.activation import inner_name, num_branches, pointwise
from expertmesh.ops.autocast import autocast_dtype
from expertmesh.ops.backend import gemm_dtype
from expertmesh.ops.expert_loop import (
    grouped_mm_serves,
    product_into,
    selected,
    weight_goes_first,
)
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.reference import accumulate_dtype

MOST_SLOTS = 512
"""From about here on PyTorch orders the slots faster than Python."""
MOST_ELEMENTS = 1 << 20
"""Of H; with more the passes had better go block by block."""
MOST_ROWS = 16
"""Of one expert; products of more are padded (`gemm_rows`), which is the general way's business."""


def serves(
    x_TD: Tensor, w_in: Tensor, w_out: Tensor, ids_TK: Tensor, weights_TK: Tensor, backend: str
) -> bool:
    """Whether `moe_mlp_of_few` may run: few slots on the CPU, no gradient, compiler or autocast, arguments that fit."""
    num_slots, (_, G, F, D) = ids_TK.numel(), w_in.shape
    return (
        0 < num_slots <= min(MOST_SLOTS, MOST_ELEMENTS // (G * F))
        and backend in ("auto", "torch")
        and runs_plainly(x_TD, ids_TK, weights_TK, w_in, w_out)
        and autocast_dtype(x_TD.device) is None
        and x_TD.dtype == w_in.dtype == w_out.dtype == gemm_dtype(x_TD.device, x_TD.dtype)
        and x_TD.shape == (ids_TK.shape[0], D)
        and ids_TK.shape == weights_TK.shape
        and w_in.is_contiguous()
        and w_out.is_contiguous()
    )


def moe_mlp_of_few(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
) -> Tensor | None:
    """`moe_mlp` without biases and gradients, from the ids themselves; only where `serves` says so.

    Args:
        x_TD: (T, D).
        w_in_EGFD: (E, G, F, D).
        w_out_EDF: (E, D, F).
        ids_TK: (T, K) in [0, E]; E is skipped.
        weights_TK: (T, K).
        activation: its name.

    Returns:
        y (T, D), or None where an expert has so many rows that the general way is better.

    Raises:
        ConfigError: an id is out of range.
    """
    T, K = ids_TK.shape
    order = _Order.of(ids_TK, w_in_EGFD.shape[0])
    if max(order.sizes, default=0) > MOST_ROWS:
        return None
    x_RD, s_R = x_TD.expand(K, -1) if T == 1 else x_TD, weights_TK.reshape(-1)
    maps = order.maps
    if maps is not None:
        x_RD = x_TD.index_select(0, maps.token_of_row)
        s_R = s_R.index_select(0, maps.slot_of_row)
    h_RH = _multiply(x_RD, w_in_EGFD.flatten(1, 2), order)
    a_RF = _activate(h_RH, s_R.to(accumulate_dtype(x_TD.dtype)), activation)
    y_RD = _multiply(a_RF, w_out_EDF, order)
    if maps is None:
        return y_RD.sum(0, keepdim=True)
    if maps.some_are_dead:
        y_RD = torch.cat((y_RD, y_RD.new_zeros(1, y_RD.shape[1])))
    return y_RD.index_select(0, maps.row_of_slot).view(T, K, -1).sum(1)


@dataclass(frozen=True)
class _Maps:
    """int32 tensors as in `RouteMetadata`, but dead slots have the row behind the last one."""

    ends_E: Tensor
    token_of_row: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    some_are_dead: bool


@dataclass(frozen=True)
class _Order:
    """The rows of the experts in turn.

    Attributes:
        experts: one entry per block of rows.
        sizes: rows of each.
        maps: None: the rows are the slots of one token, in order.
    """

    experts: list[int]
    sizes: list[int]
    maps: _Maps | None

    @staticmethod
    def of(ids_TK: Tensor, num_experts: int) -> "_Order":
        T, K = ids_TK.shape
        ids = ids_TK.reshape(-1).tolist()
        least, most = min(ids), max(ids)
        if not 0 <= least <= most <= num_experts:
            raise ConfigError(
                f"expert_ids holds values from {least} to {most}; they must be in 0..{num_experts} (the last means no "
                "expert); check the router"
            )
        if T == 1 and most < num_experts:
            return _Order(ids, [1] * K, None)
        slots_of: list[list[int]] = [[] for _ in range(num_experts + 1)]
        for slot, e in enumerate(ids):
            slots_of[e].append(slot)
        dead = slots_of.pop()
        slots = [slot for some in slots_of for slot in some]
        row_of_slot = [len(slots)] * len(ids)
        for row, slot in enumerate(slots):
            row_of_slot[slot] = row
        tokens = [slot // K for slot in slots]
        ends = list(accumulate(map(len, slots_of)))
        lists = (ends, tokens, slots, row_of_slot)
        joined = torch.tensor([i for values in lists for i in values], dtype=torch.int32)
        experts = [e for e, some in enumerate(slots_of) if some]
        ends_E, *of_slots = joined.split_with_sizes(list(map(len, lists)))
        maps = _Maps(ends_E, *of_slots, some_are_dead=bool(dead))
        return _Order(experts, [len(slots_of[e]) for e in experts], maps)


def _multiply(rows_RK: Tensor, w_ENK: Tensor, order: _Order) -> Tensor:
    """Rows times the transposed weight of their expert, (R, N)."""
    (R, K), N = rows_RK.shape, w_ENK.shape[1]
    if order.maps is not None and grouped_mm_serves(w_ENK, len(order.experts)):
        return grouped_mm(rows_RK, w_ENK.mT, offs=order.maps.ends_E)
    weights = selected(w_ENK, order.experts)
    if weight_goes_first(w_ENK, 1) and len(order.sizes) == R:
        # every row doubled, all at once, see `product_into`
        twice_R2K = rows_RK[:, None].expand(R, 2, K).contiguous()
        out_RN2 = rows_RK.new_empty(R, N, 2)
        for w, x, out in zip(weights, twice_R2K.mT.unbind(), out_RN2.unbind(), strict=True):
            torch.mm(w, x, out=out)
        return out_RN2[..., 0].contiguous()
    out_RN = rows_RK.new_empty(R, N)
    rows, outs = rows_RK.split_with_sizes(order.sizes), out_RN.split_with_sizes(order.sizes)
    for w, x, out in zip(weights, rows, outs, strict=True):
        product_into(x, w, out)
    return out_RN


def _activate(h_RH: Tensor, s_R: Tensor, activation: str) -> Tensor:
    """s * act(h), in the arithmetic of s and rounded once."""
    branches = h_RH.chunk(num_branches(activation), 1)
    act = pointwise(branches[0].to(s_R.dtype), inner_name(activation))
    for up in branches[1:]:
        act.mul_(up)
    return act.mul_(s_R[:, None]).to(h_RH.dtype)
