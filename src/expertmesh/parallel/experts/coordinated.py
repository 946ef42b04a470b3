"""Dispatch and combine for an engine whose tensor-parallel ranks have the same tokens.

Coordinated all-to-all (DeepSpeed-MoE, Rajbhandari et al. 2022, arXiv 2201.05596, 5.3): of p ranks, L neighbours share
their tokens (a tensor group). A rank with index l in its group exchanges tokens only with the ranks of index l in the p
/ L groups; the L ranks of a group then all-gather their results. This takes p / L + L messages per rank, where a plain
all-to-all takes p.

Sizes are fixed: every group has room for as many tokens as the largest group. All ranks know this number from the
step's description, so the host never waits for row counts. Requires `torch.no_grad()`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.comm.all_to_all.flat import start_all_to_all
from expertmesh.comm.collectives import all_gather, start_all_gather
from expertmesh.comm.group import Pending, RankGroup, wait
from expertmesh.config.dispatch_options import AS_USUAL, DispatchOptions
from expertmesh.costs.eplb import Placement
from expertmesh.moe.dispatch import Dispatched, Experts, apply_experts
from expertmesh.moe.experts import ExpertParameters
from expertmesh.moe.phases import phase
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.experts.native import dtype_of_rows
from expertmesh.ops.permute import sum_rows_in_order
from expertmesh.parallel.experts.exchange import added_over_ranks


@dataclass
class StepSizes:
    """Sizes of the current step that all ranks know."""

    most_tokens: int = 1  # tokens of the largest tensor group; at least 1
    rows: list[int] = field(default_factory=list)  # rows of logits of each tensor group


@dataclass(frozen=True)
class ServingGroups:
    """Process groups of this rank in an engine."""

    everyone: RankGroup  # all p ranks
    column: RankGroup  # the p / L ranks with this rank's index in their tensor groups
    row: RankGroup  # the tensor group: L neighbours with the same tokens
    leaders: RankGroup  # the first rank of each tensor group; for any other rank, itself alone

    @property
    def number(self) -> int:
        """Index of this rank's tensor group."""
        return self.column.rank


@dataclass(frozen=True)
class SlotTables:
    """Slots of the copies of experts, on the device."""

    slot_EC: Tensor  # (E + 1, C) slots of each expert, repeated to C entries; the last row has none
    copies_E: Tensor  # (E + 1,) number of copies

    @classmethod
    def of(cls, placement: Placement, *, device: torch.device) -> "SlotTables":
        """Tables of a placement."""
        slots, none = placement.slots_of, len(placement.experts)
        most = max(map(len, slots))
        rows = [[own[i % len(own)] for i in range(most)] for own in slots]
        return cls(
            torch.tensor([*rows, [none] * most], device=device),
            torch.tensor([*map(len, slots), 1], device=device),
        )

    def slots(self, ids_TK: Tensor) -> Tensor:
        """(T, K) slots for chosen experts: tokens, in the order that all ranks know, use the copies round-robin."""
        ids_TK = ids_TK.long()
        number_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
        slots_TK: Tensor = self.slot_EC[ids_TK, number_T1 % self.copies_E[ids_TK]]
        return slots_TK


@dataclass(frozen=True)
class CoordinatedDispatcher:
    """Dispatcher of the coordinated all-to-all. A `TokenDispatcher`.

    Attributes:
        is_split: True if the ranks of a column hold all experts: each rank of a tensor group then sends its part of the
            tokens, and the group all-gathers the sums. False: every rank of the group sends all of its tokens, and
            their sums are added.
    """

    groups: ServingGroups  # process groups of this rank
    sizes: StepSizes  # sizes of the current step
    num_experts: int  # E
    # global id of the first expert that this rank computes, or a slice of; with `tables` its first slot
    first_expert: int
    num_local: int  # number of experts, or slots, that it computes
    is_split: bool
    is_exact: bool  # whether each choice is sent home on its own, so that sums have the bits of one process
    layer: str  # name for errors and the byte counter
    tables: SlotTables | None = None  # slots of copies of experts; None: no copies

    def start(self, tokens: Dispatched, dispatch: DispatchOptions = AS_USUAL) -> "CoordinatedRoundTrip":
        """Start the dispatch of tokens."""
        return CoordinatedRoundTrip(self, tokens)

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Value unchanged: losses and counts are not used here."""
        return value


class CoordinatedRoundTrip:
    """Dispatch, experts and combine of a tensor group's tokens. A `RoundTrip`."""

    def __init__(self, dispatcher: CoordinatedDispatcher, tokens: Dispatched) -> None:
        self._dispatcher, self._num_tokens = dispatcher, len(tokens.x_TD)
        self._top_k = tokens.expert_ids_TK.shape[1]
        self._dtype = tokens.x_TD.dtype
        size = dispatcher.groups.row.size if dispatcher.is_split else 1
        self._each = -(-dispatcher.sizes.most_tokens // size)
        missing = (0, 0, 0, self._each * size - self._num_tokens)
        self._padded = Dispatched(
            F.pad(tokens.x_TD, missing),
            F.pad(tokens.expert_ids_TK, missing, value=dispatcher.num_experts),
            F.pad(tokens.weights_TK.to(accumulate_dtype(self._dtype)), missing),
        )
        self._out: Tensor | None = None
        self._pending: Pending | None = None
        if dispatcher.groups.column.size > 1:
            packed = _packed(self._own())
            where = f"{dispatcher.layer}, dispatch"
            self._out, self._pending = start_all_gather(packed, dispatcher.groups.column, where=where)

    def _own(self) -> Dispatched:
        """Part of the group's tokens that this rank sends."""
        if not self._dispatcher.is_split or self._dispatcher.groups.row.size == 1:
            return self._padded
        begin, p = self._dispatcher.groups.row.rank * self._each, self._padded
        x_TD, ids_TK, weights_TK = (one[begin : begin + self._each] for one in (p.x_TD, p.expert_ids_TK, p.weights_TK))
        return Dispatched(x_TD, ids_TK, weights_TK)

    def advance(self) -> None:
        """Do nothing: all communication has started."""

    def finish(self, experts: Experts) -> Tensor:
        """Compute this rank's experts for the tokens of its column, and combine the results."""
        dispatcher = self._dispatcher
        with phase("dispatch"):
            wait(self._pending)
            tokens = self._own()
            if self._out is not None:
                tokens = _unpacked(self._out.flatten(0, 1), self._padded)
            tokens = self._here(tokens)
        parameters = _of_type(experts, tokens.x_TD.dtype) if dispatcher.is_exact else None
        y_RD = apply_experts(experts, tokens, parameters)
        with phase("combine"):
            y_TD = self._home(y_RD)
            if dispatcher.groups.row.size > 1:
                parts_LTD = all_gather(y_TD, dispatcher.groups.row, where=f"{dispatcher.layer}, gather")
                y_TD = parts_LTD.flatten(0, 1) if dispatcher.is_split else added_over_ranks(parts_LTD)
            y_TD = y_TD[: self._num_tokens * (self._top_k if dispatcher.is_exact else 1)]
            return (_in_slot_order(y_TD, self._top_k) if dispatcher.is_exact else y_TD).to(self._dtype)

    def _here(self, tokens: Dispatched) -> Dispatched:
        """Tokens with ids counted from this rank's first expert; choices of other ranks' experts become no choice."""
        dispatcher = self._dispatcher
        ids_TK = tokens.expert_ids_TK
        if dispatcher.tables is not None:
            ids_TK = dispatcher.tables.slots(ids_TK)
        local_TK = ids_TK - dispatcher.first_expert
        is_own_TK = (local_TK >= 0) & (local_TK < dispatcher.num_local)
        local_TK = torch.where(is_own_TK, local_TK, dispatcher.num_local)
        tokens = replace(tokens, expert_ids_TK=local_TK, weights_TK=tokens.weights_TK * is_own_TK)
        if not dispatcher.is_exact:
            return tokens
        x_TD = tokens.x_TD.to(dtype_of_rows(tokens.x_TD.device, self._dtype))
        return Dispatched(
            x_TD.repeat_interleave(self._top_k, 0),
            local_TK.view(-1, 1),
            tokens.weights_TK.view(-1, 1),
        )

    def _home(self, y_RD: Tensor) -> Tensor:
        """Sums over the column's ranks for the tokens that this rank sent."""
        column = self._dispatcher.groups.column
        if column.size == 1:
            return y_RD
        # explicit sizes, though all are equal: on a CPU both directions of a link are then used at once
        sizes = [len(y_RD) // column.size] * column.size
        where = f"{self._dispatcher.layer}, combine"
        rows, pending = start_all_to_all(y_RD, sizes, sizes, column, where=where)
        wait(pending)
        return added_over_ranks(rows.unflatten(0, (column.size, -1)))


def _of_type(experts: Experts, dtype: torch.dtype) -> ExpertParameters | None:
    """Experts' parameters cast to the dtype of their tokens if they differ (a CPU without matmuls of that dtype), else
    None."""
    grouped: Any = experts  # those in slots are cast when they are used
    if grouped.paging is not None or (grouped.format == "dense" and grouped.dtype == dtype):
        return None
    return ExpertParameters(grouped.weights().to(dtype))


def _in_slot_order(y_ND: Tensor, top_k: int) -> Tensor:
    """(T, D): sums over the choices of each token, in the order of one process."""
    rows_N = torch.arange(len(y_ND), dtype=torch.int32, device=y_ND.device)
    offsets = torch.tensor([0, len(y_ND)], dtype=torch.int32, device=y_ND.device)
    return sum_rows_in_order(y_ND, offsets, rows_N, top_k)


def _packed(tokens: Dispatched) -> Tensor:
    """(T, bytes): tokens, weights and ids (int32) in one tensor, to be sent as one message."""
    columns = (tokens.x_TD, tokens.weights_TK, tokens.expert_ids_TK.to(torch.int32))
    return torch.cat([one.contiguous().view(torch.uint8) for one in columns], 1)


def _unpacked(packed: Tensor, like: Dispatched) -> Dispatched:
    """Inverse of `_packed`."""
    columns = (like.x_TD, like.weights_TK, like.expert_ids_TK.to(torch.int32))
    sizes = [one.shape[1] * one.element_size() for one in columns]
    x, weights, ids = (
        part.contiguous().view(one.dtype) for part, one in zip(packed.split(sizes, 1), columns, strict=True)
    )
    return Dispatched(x, ids.long(), weights)
