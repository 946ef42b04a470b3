"""Redundant experts on the ranks of an engine (EPLB): slots, slot tables, and transfers of weights to new slots.

Choices of an expert are assigned to its copies round-robin, by the index of the token among those that the ranks
exchange. All ranks know this index, so no message is added. Placement follows from the counted loads
(`expertmesh.costs.eplb`). Every rank has these loads and computes the same placement; only weights travel, layer
by layer, from a rank that has an expert to one that lacks it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from expertmesh.comm.all_to_all.flat import start_all_to_all
from expertmesh.comm.group import RankGroup, wait
from expertmesh.costs.eplb import Placement, in_order, placed
from expertmesh.errors import ConfigError
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.coordinated import CoordinatedDispatcher, SlotTables
from expertmesh.parallel.serving import ServingDegrees, own_tensors, part_of, put_tensor


@dataclass
class PlacementCounts:
    """Counters of expert rebalancing.

    Attributes:
        before: balance of each MoE layer (mean load of a rank / largest) for the last counted loads, under the
            placement before the last rebalance.
    """

    num_rebalances: int  # number of calls of `rebalance`
    num_moved: int  # experts that moved to a rank without a copy of them, summed over layers
    before: list[float]
    after: list[float]  # balance for the same loads, under the current placement


class RedundantExperts:
    """Experts of a sharded model with slots for redundant copies. Every rank must construct it."""

    def __init__(
        self,
        model: nn.Module,  # cut by `spread_layers`, with plain parameters (`as_plain`)
        degrees: ServingDegrees,  # parallel degrees of the model
        everyone: RankGroup,  # group of all ranks
        *,
        nodes: Sequence[int],  # node of each rank
        num_redundant: int,  # slots per layer beyond one for each expert
    ) -> None:
        self._degrees, self._everyone = degrees, everyone
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        parts = degrees.e
        if not self._layers or parts == 1:
            raise ConfigError(
                "enable_eplb",
                True,
                "has no effect where each rank has all experts",
                "leave it out, or let ep_degree be above 1",
            )
        for layer in self._layers:
            if layer.grouped is not None and layer.grouped.paging is not None:
                raise ConfigError(
                    "enable_eplb",
                    True,
                    "moves experts between the ranks' memories, and expert_slots leave them in the files",
                    "leave one of them out",
                )
            total = layer.num_experts + num_redundant
            if total % parts or num_redundant > layer.num_experts * (parts - 1):
                near = num_redundant + -total % parts
                fits = near <= layer.num_experts * (parts - 1)
                raise ConfigError(
                    "num_redundant_experts",
                    num_redundant,
                    f"the {layer.num_experts} experts and their copies must fill equal slots of {parts} parts, each "
                    "part one copy at most",
                    f"use {near if fits else layer.num_experts * (parts - 1)}",
                )
        self._num_redundant = num_redundant
        self._num_nodes = _equal_nodes([nodes[_position(i, degrees)] for i in range(parts)])
        self._placements = [in_order(layer.num_experts, parts) for layer in self._layers]
        even = [[1] * layer.num_experts for layer in self._layers]
        for number, (layer, loads) in enumerate(zip(self._layers, even, strict=True)):
            self._put(number, layer, self._wanted(layer, loads))
        ones = [1.0] * len(self._layers)
        self.counts = PlacementCounts(0, 0, ones, list(ones))  # counters of rebalancing

    @property
    def placements(self) -> list[Placement]:
        """Current placement of each MoE layer."""
        return list(self._placements)

    def rebalance(self, loads: Sequence[Sequence[int]]) -> None:
        """Move experts to the placement for new loads; every rank must call, with the same loads."""
        counts = self.counts
        counts.num_rebalances += 1
        for number, (layer, own) in enumerate(zip(self._layers, loads, strict=True)):
            old = self._placements[number]
            counts.before[number] = old.balance(own)
            new = self._wanted(layer, own)
            if new.balance(own) > counts.before[number]:
                counts.num_moved += self._put(number, layer, new)
            counts.after[number] = self._placements[number].balance(own)

    def _wanted(self, layer: MoELayer, loads: Sequence[int]) -> Placement:
        return placed(
            loads,
            num_slots=layer.num_experts + self._num_redundant,
            num_ranks=self._degrees.e,
            num_nodes=self._num_nodes,
            num_groups=layer.options.num_expert_groups,
        )

    @torch.no_grad()
    def _put(self, number: int, layer: MoELayer, new: Placement) -> int:
        """Apply a placement to a layer; returns the number of experts that moved to a part without them."""
        old = self._placements[number]
        wants = [sorted(set(new.of_rank(part)) - set(old.of_rank(part))) for part in range(new.num_ranks)]
        own, _ = part_of(self._everyone.rank, self._degrees)
        for name, tensor in own_tensors(layer.experts):
            # as bytes, because collectives do not support all dtypes
            there = tensor.detach().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.detach()
            found = self._moved(there, old, new, wants, where=f"{name}, placement")
            put_tensor(layer.experts, name, found.view(tensor.dtype))
        size = new.slots_per_rank
        layer.experts.num_experts = size
        assert isinstance(layer.dispatcher, CoordinatedDispatcher)
        device = own_tensors(layer.experts)[0][1].device
        layer.dispatcher = replace(
            layer.dispatcher,
            first_expert=own * size,
            num_local=size,
            tables=SlotTables.of(new, device=device),
        )
        self._placements[number] = new
        return sum(map(len, wants))

    def _moved(
        self,
        parameter: Tensor,
        old: Placement,
        new: Placement,
        wants: list[list[int]],
        *,
        where: str,
    ) -> Tensor:
        """Weights (slots, ...) of a parameter on this rank under a new placement."""
        own, _ = part_of(self._everyone.rank, self._degrees)
        here = {expert: slot for slot, expert in enumerate(old.of_rank(own))}
        rows = {expert: parameter[slot] for expert, slot in here.items()}
        if any(wants):
            giver = {e: slots[0] // old.slots_per_rank for e, slots in enumerate(old.slots_of)}
            gives, takes = [], []
            for rank in range(self._everyone.size):
                part, _ = part_of(rank, self._degrees)
                is_twin = rank == self._twin(part)
                gives.append([e for e in wants[part] if is_twin and giver[e] == own])
                takes.append([e for e in wants[own] if is_twin and giver[e] == part])
            sent = [here[expert] for each in gives for expert in each]
            arrived, pending = start_all_to_all(
                parameter[sent],
                list(map(len, gives)),
                list(map(len, takes)),
                self._everyone,
                where=where,
            )
            wait(pending)
            names = [expert for each in takes for expert in each]
            rows |= dict(zip(names, arrived, strict=True))
        return torch.stack([rows[expert] for expert in new.of_rank(own)])

    def _twin(self, part: int) -> int:
        """Rank that has the same slice, and the same place in its group, for another part of the experts."""
        d, rank = self._degrees, self._everyone.rank
        own, _ = part_of(rank, d)
        return rank + _position(part, d) - _position(own, d)


def _position(part: int, degrees: ServingDegrees) -> int:
    """First rank that has a part of the experts."""
    return part * degrees.f * (degrees.tp if degrees.is_split else 1)


def _equal_nodes(nodes: list[int]) -> int:
    """Number of nodes if each holds equally many consecutive parts of the experts, else 1."""
    count = len(set(nodes))
    size = len(nodes) // count
    if len(nodes) % count or any(len(set(nodes[i * size : (i + 1) * size])) > 1 for i in range(count)):
        return 1
    return count
