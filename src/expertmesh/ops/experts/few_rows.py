"""Experts on a CPU for few rows, as in decoding, where calls cost as much as products.

The steps are the general forward's (large weights leave H and A in FP32, see `compiled_products`). Rows are sorted in
Python from one list of the ids, and a single token's rows stay in the order of its choices, so that nothing is
gathered.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, grouped_mm

from expertmesh.ops.activation import (
    inner_name,
    num_branches,
    pointwise,
    pointwise_,
    second_branch,
)
from expertmesh.ops.cpu import compiled_products
from expertmesh.ops.cpu.products import (
    goes_to_onednn,
    grouped_mm_serves,
    rows_times_weight,
    selected,
    weight_goes_first,
)
from expertmesh.ops.dtypes import accumulate_dtype, has_products_of
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.route_metadata import check_range_of_ids

MOST_SLOTS = 512
"""Maximum number of slots; above about this number PyTorch sorts slots faster than Python."""
MOST_ELEMENTS = 1 << 20
"""Maximum number of elements of H; above it, block-wise passes are faster."""
_BLOCK_ELEMENTS = 1 << 16
"""Elements of one branch of H that are widened at a time: 256 KiB, which stay in the L2 cache."""
MOST_ROWS = 16
"""Maximum number of rows of one expert; products of more rows are padded (`gemm_rows`), which only the general path does."""


def serves(
    x: Tensor,
    num_slots: int,
    w_in: Tensor,
    w_out: Tensor,
    weights_TK: Tensor | None = None,
    *,
    backend: str,
) -> bool:
    """Whether `moe_mlp_of_few` may run for tokens (..., D): few slots on the CPU, no gradient, compiler or autocast."""
    _, G, F, D = w_in.shape
    return (
        # first, because a compiler would guard on the sizes below
        runs_plainly(x, w_in, w_out, weights_TK)
        and 0 < num_slots <= MOST_SLOTS
        and num_slots * G * F <= MOST_ELEMENTS
        and x.dtype is w_in.dtype
        and x.shape[-1] == D
        and backend in ("auto", "torch")
        and not torch.is_autocast_enabled("cpu")
        and w_in.is_contiguous()
        and (has_products_of(x.dtype) or w_in.numel() >= compiled_products.SMALLEST)
    )


def moe_mlp_of_few(
    x_TD: Tensor,
    w_in_EGFD: Tensor,
    w_out_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    activation: str,
    b_in_EGF: Tensor | None = None,
    b_out_ED: Tensor | None = None,
) -> Tensor | None:
    """Compute `moe_mlp` without gradients from expert ids; only for calls that `serves` accepts.

    Args:
        x_TD: (T, D).
        w_in_EGFD: (E, G, F, D).
        w_out_EDF: (E, D, F).
        ids_TK: (T, K) in [0, E]; E is skipped.
        weights_TK: (T, K).
        activation: the name of the activation.
        b_in_EGF: (E, G, F), or None.
        b_out_ED: (E, D), or None.

    Returns:
        y (T, D); None if an expert has so many rows that the general path is faster, or if H would be rounded before
        its bias is added.

    Raises:
        ConfigError: an id is out of range.
    """
    T, K = ids_TK.shape
    order = _Order.of(ids_TK.flatten().tolist(), K, w_in_EGFD.shape[0])
    if max(order.sizes, default=0) > MOST_ROWS:
        return None
    w_in_EHD = w_in_EGFD.flatten(1, 2)
    rows_in, rows_out = (
        compiled_products.rows_at_once(w, order.sizes) for w in (w_in_EHD, w_out_EDF)
    )
    if not (rows_in and rows_out) and not has_products_of(x_TD.dtype):
        return None
    blocks = {rows: _Blocks.of(order, rows) for rows in {rows_in, rows_out} - {0}}
    dtype = accumulate_dtype(x_TD.dtype)
    if x_TD.dtype != dtype and (
        (b_in_EGF is not None and not rows_in) or (b_out_ED is not None and not rows_out)
    ):
        return None
    x_RD, s_R = x_TD.expand(K, -1) if T == 1 else x_TD, weights_TK.reshape(-1)
    maps = order.maps
    if maps is not None:
        x_RD = x_TD.index_select(0, maps.token_of_row)
        s_R = s_R.index_select(0, maps.slot_of_row)
    h_RH, s_R = _multiply(x_RD, w_in_EHD, order, blocks.get(rows_in)), s_R.to(dtype)
    if b_in_EGF is not None:
        h_RH.add_(b_in_EGF.flatten(1).index_select(0, order.expert_of_row))
    y_RD = _multiply(_activate(h_RH, s_R, activation), w_out_EDF, order, blocks.get(rows_out))
    if b_out_ED is not None:
        y_RD.addcmul_(s_R[:, None], b_out_ED.index_select(0, order.expert_of_row).to(dtype))
    if maps is None:
        return y_RD.sum(0, keepdim=True).to(x_TD.dtype)
    if maps.some_are_dead:
        y_RD = torch.cat((y_RD, y_RD.new_zeros(1, y_RD.shape[1])))
    # the sum over each token's rows in FP32, in one pass
    return embedding_bag(maps.row_of_slot, y_RD, maps.first_slot_T, mode="sum").to(x_TD.dtype)


class _Maps:
    """Maps of `RouteMetadata` as int32 tensors, with each token's first slot; dead slots have the row behind the last one."""

    def __init__(self, parts: Sequence[Tensor], some_are_dead: bool) -> None:
        self.ends_E, self.token_of_row, self.slot_of_row, self.row_of_slot, self.first_slot_T = (
            parts
        )
        self.some_are_dead = some_are_dead


@dataclass(frozen=True)
class _Order:
    """Order of the rows by expert.

    Attributes:
        experts: expert of each block of rows.
        sizes: number of rows of each block.
        maps: map between slots and rows; None: the rows are the slots of one token, in order.
    """

    experts: list[int]
    sizes: list[int]
    maps: _Maps | None

    @cached_property
    def expert_of_row(self) -> Tensor:
        """(R,) int64 expert of each row."""
        return torch.tensor(
            [e for e, size in zip(self.experts, self.sizes, strict=True) for _ in range(size)],
            dtype=torch.int64,
        )

    @staticmethod
    def of(ids: list[int], top_k: int, num_experts: int) -> "_Order":
        least, most = min(ids), max(ids)
        check_range_of_ids(least, most, num_experts)
        if len(ids) == top_k and most < num_experts:
            return _Order(ids, [1] * top_k, None)
        # stable sort by expert; rows behind the last end are dead
        slots = sorted(range(len(ids)), key=ids.__getitem__)
        sorted_ids = [ids[slot] for slot in slots]
        ends = [bisect_right(sorted_ids, e) for e in range(num_experts)]
        row_of_slot = sorted(range(len(ids)), key=slots.__getitem__)
        num_rows = ends[-1]
        some_are_dead = num_rows < len(ids)
        if some_are_dead:
            row_of_slot = [min(row, num_rows) for row in row_of_slot]
            del slots[num_rows:]
        tokens = [slot // top_k for slot in slots]
        # torch reads an array at once, but a list number by number
        firsts = list(range(0, len(ids), top_k))
        joined = array("i", ends + tokens + slots + row_of_slot + firsts)
        lengths = [num_experts, num_rows, num_rows, len(ids), len(firsts)]
        parts = torch.frombuffer(joined, dtype=torch.int32).split_with_sizes(lengths)
        sizes = [end - start for start, end in pairwise([0, *ends])]
        experts = [e for e, size in enumerate(sizes) if size]
        return _Order(experts, [size for size in sizes if size], _Maps(parts, some_are_dead))


@dataclass(frozen=True)
class _Blocks:
    """Rows in blocks of up to M of one expert, as `compiled_products` takes them.

    Attributes:
        experts_B: (B,) int32 expert of each block.
        rows_BM: (B, M) int32 rows of each block; a block with fewer rows repeats one.
        places_R: (R,) int32 position of each row in the (B * M) results.
    """

    experts_B: Tensor
    rows_BM: Tensor
    places_R: Tensor

    @staticmethod
    def of(order: _Order, rows_at_once: int) -> "_Blocks":
        experts: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        start = 0
        for e, size in zip(order.experts, order.sizes, strict=True):
            stop = start + size
            for first in range(start, stop, rows_at_once):
                here = range(first, min(first + rows_at_once, stop))
                places += range(len(rows), len(rows) + len(here))
                rows += here
                rows += [first] * (rows_at_once - len(here))
                experts.append(e)
            start = stop
        lengths = [len(experts), len(rows), len(places)]
        joined = torch.frombuffer(array("i", experts + rows + places), dtype=torch.int32)
        experts_B, rows_N, places_R = joined.split_with_sizes(lengths)
        return _Blocks(experts_B, rows_N.view(-1, rows_at_once), places_R)

    def multiply(self, rows_RK: Tensor, w_ENK: Tensor) -> Tensor:
        """Multiply as `_multiply` does, in FP32."""
        x_RK = rows_RK.float().contiguous()
        out_BMN = compiled_products.product(x_RK, w_ENK, self.experts_B, self.rows_BM)
        out_WN = out_BMN.flatten(0, 1)
        return out_WN if len(out_WN) == len(x_RK) else out_WN.index_select(0, self.places_R)


def _multiply(rows_RK: Tensor, w_ENK: Tensor, order: _Order, blocks: _Blocks | None) -> Tensor:
    """Multiply rows by the transposed weights of their experts, (R, N); in FP32 with `blocks`."""
    if blocks is not None:
        return blocks.multiply(rows_RK, w_ENK)
    rows_RK = rows_RK.to(w_ENK.dtype)
    (R, K), N = rows_RK.shape, w_ENK.shape[1]
    if order.maps is not None and grouped_mm_serves(w_ENK, len(order.experts)):
        return grouped_mm(rows_RK, w_ENK.mT, offs=order.maps.ends_E)
    if weight_goes_first(w_ENK, 1) and len(order.sizes) == R:
        # every row doubled, all at once, see `rows_times_weight`
        twice_R2K = rows_RK[:, None].expand(R, 2, K).contiguous()
        out_RN2 = rows_RK.new_empty(R, N, 2)
        columns = (selected(w_ENK, order.experts), twice_R2K.mT.unbind(), out_RN2.unbind())
        for w, x, out in zip(*columns, strict=True):
            torch.mm(w, x, out=out)
        return out_RN2[..., 0].contiguous()
    out_RN = rows_RK.new_empty(R, N)
    rows, outs = rows_RK.split_with_sizes(order.sizes), out_RN.split_with_sizes(order.sizes)
    if not goes_to_onednn(w_ENK.dtype, w_ENK.device):
        for w_KN, x, out in zip(selected(w_ENK.mT, order.experts), rows, outs, strict=True):
            torch.mm(x, w_KN, out=out)
        return out_RN
    for w, x, out in zip(selected(w_ENK, order.experts), rows, outs, strict=True):
        rows_times_weight(x, w, out)
    return out_RN


def _activate(h_RH: Tensor, s_R: Tensor, activation: str) -> Tensor:
    """Compute s * act(h) in the dtype of s, rounded once to the dtype of h."""
    branches, inner, s_R1 = num_branches(activation), inner_name(activation), s_R[:, None]
    if h_RH.dtype == s_R.dtype:
        gate, *up = h_RH.chunk(branches, 1)
        return _gated(pointwise(gate, inner), up, inner).mul_(s_R1)
    R, hidden_dim = h_RH.shape[0], h_RH.shape[1] // branches
    size = max(1, _BLOCK_ELEMENTS // hidden_dim)
    if size >= R:
        gate, *up = h_RH.chunk(branches, 1)
        return _gated(pointwise_(gate.to(s_R.dtype), inner), up, inner).mul_(s_R1).to(h_RH.dtype)
    out_RF = h_RH.new_empty(R, hidden_dim)
    for h, s, out in zip(h_RH.split(size), s_R1.split(size), out_RF.split(size), strict=True):
        gate, *up = h.chunk(branches, 1)
        out.copy_(_gated(pointwise_(gate.to(s.dtype), inner), up, inner).mul_(s))
    return out_RF


def _gated(act_RF: Tensor, up: list[Tensor], inner: str) -> Tensor:
    for branch in up:
        act_RF.mul_(second_branch(branch.to(act_RF.dtype), inner))
    return act_RF
