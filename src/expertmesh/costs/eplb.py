"""Placement of experts and their copies on ranks, by counted load (DeepSeek's EPLB).

Hot experts get room on several ranks. In training their weights come to all ranks for a call (`replicated_experts`). An
engine keeps copies in slots: the expert with most load per copy gets the next slot until all are taken. Slots are then
packed onto ranks, the heaviest first, each onto the rank with least load that has room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The expert of every slot.

    Example:
        >>> from expertmesh.costs.eplb import in_order, placed
        >>> loads = [9, 1, 1, 1]
        >>> round(in_order(4, 2).balance(loads), 2)
        0.6
        >>> better = placed(loads, num_slots=6, num_ranks=2)
        >>> better.experts, better.balance(loads)
        ((0, 1, 3, 0, 1, 2), 1.0)
    """

    experts: tuple[int, ...]  # expert of each slot, rank by rank; every expert has at least one slot
    num_ranks: int  # number of ranks, which have equally many slots

    @property
    def slots_per_rank(self) -> int:
        """Number of slots of each rank."""
        return len(self.experts) // self.num_ranks

    @cached_property
    def num_experts(self) -> int:
        """Number of experts, E."""
        return 1 + max(self.experts)

    @cached_property
    def slots_of(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The experts of a rank's slots."""
        size = self.slots_per_rank
        return self.experts[rank * size : (rank + 1) * size]

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Load of each rank, where tokens of an expert go to its copies in turn."""
        each = [load / len(slots) for load, slots in zip(loads, self.slots_of, strict=True)]
        return [sum(each[e] for e in self.of_rank(rank)) for rank in range(self.num_ranks)]

    def balance(self, loads: Sequence[float]) -> float:
        """Mean load of the ranks divided by the largest: 1 where all are equal, or where there is no load."""
        of_ranks = self.rank_loads(loads)
        largest = max(of_ranks)
        return sum(of_ranks) / len(of_ranks) / largest if largest > 0 else 1.0


def in_order(num_experts: int, num_ranks: int) -> Placement:
    """A placement with one slot for each expert, in their order."""
    return Placement(tuple(range(num_experts)), num_ranks)


def hottest(loads: Sequence[float], number: int) -> tuple[int, ...]:
    """Ids of the experts with most load, ascending; among equals the first."""
    by_load = sorted(range(len(loads)), key=lambda e: (-loads[e], e))
    return tuple(sorted(by_load[:number]))


def num_copies(loads: Sequence[float], *, num_slots: int, most: int) -> list[int]:
    """Number of slots of each expert: the next slot goes to the expert with most load per copy.

    Args:
        most: largest number of copies of an expert; a second one on the same rank would be of no use.
    """
    copies = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        free = (e for e in range(len(loads)) if copies[e] < most)
        copies[max(free, key=lambda e: (loads[e] / copies[e], -copies[e], -e))] += 1
    return copies


def packed(weights: Sequence[float], kinds: Sequence[int], num_packs: int) -> list[list[int]]:
    """Pack items into equal packs: heaviest first, each into the lightest pack with room, if possible without an item
    of its kind.

    Args:
        weights: weight of each item; num_packs divides their number.

    Returns:
        Indices of the items of each pack, in the order in which they were packed.
    """
    size = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        free = [p for p in range(num_packs) if len(packs[p]) < size]
        new = [p for p in free if all(kinds[other] != kinds[item] for other in packs[p])]
        pack = min(new or free, key=lambda p: (totals[p], p))
        packs[pack].append(item)
        totals[pack] += weights[item]
    return packs


def placed(
    loads: Sequence[float],  # load of each expert
    *,
    num_slots: int,  # slots of all ranks; a multiple of num_ranks, from E to E times the ranks of a node
    num_ranks: int,
    num_nodes: int = 1,  # number of nodes, with equally many ranks each, in their order; it divides num_ranks
    num_groups: int = 1,  # number of the router's groups of neighbouring experts
) -> Placement:
    """Placement of experts and copies for counted loads.

    With several nodes whose number divides num_groups, each group of experts lies on one node, so that the tokens of a
    group-limited router reach few nodes. Groups are packed onto nodes, then each node places its own experts and
    copies.
    """
    E = len(loads)
    if num_nodes == 1 or num_groups % num_nodes or E % num_groups:
        num_nodes = num_groups = 1
    size = E // num_groups
    of_groups = [sum(loads[g * size : (g + 1) * size]) for g in range(num_groups)]
    slots: list[int] = []
    for groups in packed(of_groups, range(num_groups), num_nodes):
        experts = [g * size + i for g in sorted(groups) for i in range(size)]
        ranks = num_ranks // num_nodes
        own = [loads[e] for e in experts]
        copies = num_copies(own, num_slots=num_slots // num_nodes, most=ranks)
        items = [i for i, count in enumerate(copies) for _ in range(count)]
        weights = [own[i] / copies[i] for i in items]
        for pack in packed(weights, items, ranks):
            slots += sorted(experts[items[item]] for item in pack)
    return Placement(tuple(slots), num_ranks)
