"""Tokens of a step to the ranks of their experts and home, where tensor-parallel ranks have the same tokens.

Coordinated all-to-all (DeepSpeed-MoE, Rajbhandari et al. 2022, arXiv 2201.05596, 5.3): of p ranks, L neighbours share their tokens (a
tensor group). What the rank with place l in its group sends goes only to the ranks with place l in the p / L groups, and the L ranks then
gather what each of them got home: p / L + L messages, where each rank that sends to all others has p.

Sizes are fixed: every group has room for as many tokens as the group that has most, which all know from the step's description, so that
the host never waits for numbers of other ranks. Only under `torch.no_grad()`.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from expertmesh.comm.all_to_all.flat import start_all_to_all
from expertmesh.comm.collectives import all_gather, start_all_gather
from expertmesh.comm.group import Pending, RankGroup, wait
from expertmesh.config.dispatch_options import AS_USUAL, DispatchOptions
from expertmesh.costs.placement import Placement
from expertmesh.moe.dispatch import Dispatched, Experts, apply_experts
from expertmesh.moe.experts import ExpertParameters, GroupedExperts
from expertmesh.moe.phases import phase
from expertmesh.ops.dtypes import accumulate_dtype, gemm_dtype
from expertmesh.ops.permute import sum_rows


@dataclass
class StepSizes:
    """What all ranks know of the step that is computed.

    Attributes:
        most_tokens: of the tensor group that has most; at least 1.
        rows: rows of logits of each tensor group.
    """

    most_tokens: int = 1
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ServingGroups:
    """Where this rank is among those that answer together.

    Attributes:
        everyone: all p ranks.
        column: the p / L ranks with this one's place in their tensor groups.
        row: the tensor group: L neighbours with the same tokens.
        leaders: the first rank of each tensor group; of another rank itself alone.
    """

    everyone: RankGroup
    column: RankGroup
    row: RankGroup
    leaders: RankGroup

    @property
    def number(self) -> int:
        """Of this rank's tensor group."""
        return self.column.rank


@dataclass(frozen=True)
class SlotTables:
    """Where the copies of experts lie, on the device.

    Attributes:
        slot_EC: (E + 1, C) the slots of each expert, over and over; in the last row none.
        copies_E: (E + 1,) how many there are.
    """

    slot_EC: Tensor
    copies_E: Tensor

    @classmethod
    def of(cls, placement: Placement, *, device: torch.device) -> "SlotTables":
        """The tables of a placement."""
        slots, none = placement.slots_of, len(placement.experts)
        most = max(map(len, slots))
        rows = [[own[i % len(own)] for i in range(most)] for own in slots]
        return cls(
            torch.tensor([*rows, [none] * most], device=device),
            torch.tensor([*map(len, slots), 1], device=device),
        )

    def slots(self, ids_TK: Tensor) -> Tensor:
        """(T, K) slots for choices of experts: the tokens, which all ranks have in this order, go to the copies in turn."""
        ids_TK = ids_TK.long()
        number_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
        slots_TK: Tensor = self.slot_EC[ids_TK, number_T1 % self.copies_E[ids_TK]]
        return slots_TK


@dataclass(frozen=True)
class CoordinatedDispatcher:
    """Sends tokens as above. A `TokenDispatcher`.

    Attributes:
        groups: of this rank.
        sizes: of the step that is computed.
        num_experts: E.
        first_expert: global id of the first expert that this rank computes, perhaps a slice of it; with tables its first slot.
        num_local: experts that it computes, or slots.
        is_split: whether the ranks of a column hold all experts: a tensor group then splits its tokens, each rank sends its part, and they
            gather the sums. Else every rank of the group sends all of its tokens, and their sums are added.
        is_exact: whether each choice travels home by itself, so that sums have the bits of one process.
        layer: name for errors and the byte counter.
        tables: where copies of experts lie; None: each expert is where it was cut to.
    """

    groups: ServingGroups
    sizes: StepSizes
    num_experts: int
    first_expert: int
    num_local: int
    is_split: bool
    is_exact: bool
    layer: str
    tables: SlotTables | None = None

    def start(self, tokens: Dispatched, way: DispatchOptions = AS_USUAL) -> "CoordinatedJourney":
        """Send tokens out.

        Raises:
            CollectiveError: a rank is gone.
        """
        return CoordinatedJourney(self, tokens)

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """Not asked for: nobody reads losses and counts here."""
        return value


class CoordinatedJourney:
    """The tokens of a rank's group on their way. A `RoundTrip`.

    Args:
        dispatcher: whose way they go.
        tokens: of the group, the same on all of its ranks.
    """

    def __init__(self, dispatcher: CoordinatedDispatcher, tokens: Dispatched) -> None:
        self._way, self._num_tokens = dispatcher, len(tokens.x_TD)
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
            self._out, self._pending = start_all_gather(
                packed, dispatcher.groups.column, where=where
            )

    def _own(self) -> Dispatched:
        """What this rank sends of its group's tokens."""
        if not self._way.is_split or self._way.groups.row.size == 1:
            return self._padded
        begin, p = self._way.groups.row.rank * self._each, self._padded
        x_TD, ids_TK, weights_TK = (
            one[begin : begin + self._each] for one in (p.x_TD, p.expert_ids_TK, p.weights_TK)
        )
        return Dispatched(x_TD, ids_TK, weights_TK)

    def advance(self) -> None:
        """All is under way."""

    def finish(self, experts: Experts) -> Tensor:
        """Compute this rank's experts for the tokens of its column, and bring the sums home.

        Raises:
            CollectiveError: a rank is gone or late.
        """
        way = self._way
        with phase("dispatch"):
            wait(self._pending)
            tokens = self._own()
            if self._out is not None:
                tokens = _unpacked(self._out.flatten(0, 1), self._padded)
            tokens = self._here(tokens)
        parameters = _of_type(experts, tokens.x_TD.dtype) if way.is_exact else None
        y_RD = apply_experts(experts, tokens, parameters)
        with phase("combine"):
            y_TD = self._home(y_RD)
            if way.groups.row.size > 1:
                parts_LTD = all_gather(y_TD, way.groups.row, where=f"{way.layer}, gather")
                y_TD = parts_LTD.flatten(0, 1) if way.is_split else _added(parts_LTD)
            y_TD = y_TD[: self._num_tokens * (self._top_k if way.is_exact else 1)]
            return (_in_slot_order(y_TD, self._top_k) if way.is_exact else y_TD).to(self._dtype)

    def _here(self, tokens: Dispatched) -> Dispatched:
        """Tokens with ids counted from this rank's first expert; choices of other ranks' experts are none here."""
        way = self._way
        ids_TK = tokens.expert_ids_TK
        if way.tables is not None:
            ids_TK = way.tables.slots(ids_TK)
        local_TK = ids_TK - way.first_expert
        is_own_TK = (local_TK >= 0) & (local_TK < way.num_local)
        local_TK = torch.where(is_own_TK, local_TK, way.num_local)
        tokens = replace(tokens, expert_ids_TK=local_TK, weights_TK=tokens.weights_TK * is_own_TK)
        if not way.is_exact:
            return tokens
        x_TD = tokens.x_TD.to(gemm_dtype(tokens.x_TD.device, self._dtype))
        return Dispatched(
            x_TD.repeat_interleave(self._top_k, 0),
            local_TK.view(-1, 1),
            tokens.weights_TK.view(-1, 1),
        )

    def _home(self, y_RD: Tensor) -> Tensor:
        """The sums of the column's ranks for what this rank sent."""
        column = self._way.groups.column
        if column.size == 1:
            return y_RD
        # sizes of each, though they are the same: on a CPU both directions of a link are then used at once
        sizes = [len(y_RD) // column.size] * column.size
        where = f"{self._way.layer}, combine"
        rows, pending = start_all_to_all(y_RD, sizes, sizes, column, where=where)
        wait(pending)
        return _added(rows.unflatten(0, (column.size, -1)))


def _of_type(experts: Experts, dtype: torch.dtype) -> ExpertParameters | None:
    """The experts' parameters in the type of their tokens, where a CPU without products of their own type takes another; else None."""
    if not isinstance(experts, GroupedExperts) or experts.w_in.dtype == dtype:
        return None
    return ExpertParameters(experts.weights().to(dtype))


def _added(parts_PTD: Tensor) -> Tensor:
    """(T, D): the ranks' sums for the same tokens, added in FP32 (FP64 for FP64) in the order of the ranks."""
    return parts_PTD.to(accumulate_dtype(parts_PTD.dtype)).sum(0).to(parts_PTD.dtype)


def _in_slot_order(y_ND: Tensor, top_k: int) -> Tensor:
    """(T, D): sums over the choices of each token, as one process makes them."""
    rows_N = torch.arange(len(y_ND), dtype=torch.int32, device=y_ND.device)
    offsets = torch.tensor([0, len(y_ND)], dtype=torch.int32, device=y_ND.device)
    return sum_rows(y_ND, offsets, rows_N, top_k)


def _packed(tokens: Dispatched) -> Tensor:
    """(T, bytes): tokens, weights and ids in one tensor, so that they are one message; ids as numbers of 4 bytes."""
    columns = (tokens.x_TD, tokens.weights_TK, tokens.expert_ids_TK.to(torch.int32))
    return torch.cat([one.contiguous().view(torch.uint8) for one in columns], 1)


def _unpacked(packed: Tensor, like: Dispatched) -> Dispatched:
    """What `_packed` packed."""
    columns = (like.x_TD, like.weights_TK, like.expert_ids_TK.to(torch.int32))
    sizes = [one.shape[1] * one.element_size() for one in columns]
    x, weights, ids = (
        part.contiguous().view(one.dtype)
        for part, one in zip(packed.split(sizes, 1), columns, strict=True)
    )
    return Dispatched(x, ids.long(), weights)
