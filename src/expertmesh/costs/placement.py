"""Which experts have copies, and on which ranks all of them lie: by the load that was counted.

One idea for training and for serving: the hottest experts are worth room on more ranks than one. In training they come to all ranks for
a call (`replicated_experts`); an engine keeps copies in slots of their own, and packs slots onto ranks so that none has much more to do than
the others, as DeepSeek's EPLB does: the expert with most load per copy gets the next copy until the slots are full, then the heaviest goes
first, to the rank with least load that has room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """The expert of every slot.

    Attributes:
        experts: of each slot, rank by rank; every expert has one or more.
        num_ranks: which have equally many slots.

    Example:
        >>> from expertmesh.costs.placement import in_order, placed
        >>> loads = [9, 1, 1, 1]
        >>> round(in_order(4, 2).balance(loads), 2)
        0.6
        >>> better = placed(loads, num_slots=6, num_ranks=2)
        >>> better.experts, better.balance(loads)
        ((0, 1, 3, 0, 1, 2), 1.0)
    """

    experts: tuple[int, ...]
    num_ranks: int

    @property
    def slots_per_rank(self) -> int:
        """Of every rank."""
        return len(self.experts) // self.num_ranks

    @cached_property
    def num_experts(self) -> int:
        """E."""
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
        """What each rank has to do, where tokens of an expert go to its copies in turn."""
        each = [load / len(slots) for load, slots in zip(loads, self.slots_of, strict=True)]
        return [sum(each[e] for e in self.of_rank(rank)) for rank in range(self.num_ranks)]

    def balance(self, loads: Sequence[float]) -> float:
        """The mean load of a rank by the largest: 1 where all have the same; 1 of no load, too."""
        of_ranks = self.rank_loads(loads)
        largest = max(of_ranks)
        return sum(of_ranks) / len(of_ranks) / largest if largest > 0 else 1.0


def in_order(num_experts: int, num_ranks: int) -> Placement:
    """One slot for each expert, in their order."""
    return Placement(tuple(range(num_experts)), num_ranks)


def hottest(loads: Sequence[float], number: int) -> tuple[int, ...]:
    """The experts with most load, ascending; of equals those that come first."""
    by_load = sorted(range(len(loads)), key=lambda e: (-loads[e], e))
    return tuple(sorted(by_load[:number]))


def num_copies(loads: Sequence[float], *, num_slots: int, most: int) -> list[int]:
    """How many slots each expert gets: the next one goes to that with most load per copy.

    Args:
        loads: of each expert.
        num_slots: at least one for each, and at most `most` for each.
        most: copies of one expert: more than one on a rank would be of no use.
    """
    copies = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        free = (e for e in range(len(loads)) if copies[e] < most)
        copies[max(free, key=lambda e: (loads[e] / copies[e], -copies[e], -e))] += 1
    return copies


def packed(weights: Sequence[float], kinds: Sequence[int], num_packs: int) -> list[list[int]]:
    """Items into packs of one size: the heaviest first, each into the lightest pack that has room, rather one without an item of its kind.

    Args:
        weights: of the items, as many as the packs' number divides.
        kinds: of the items.
        num_packs: of packs.

    Returns:
        The items of each pack, in the order in which they came.
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
    loads: Sequence[float],
    *,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> Placement:
    """A placement for loads that were counted.

    With several nodes, whose number divides that of the groups, each group of experts lies on one node, so that the tokens of a
    group-limited router reach few nodes: groups are packed onto nodes, and copies and slots are those of each node by itself.

    Args:
        loads: of each expert.
        num_slots: of all ranks, which divide it; from E to E times the ranks of a node.
        num_ranks: that have them.
        num_nodes: that the ranks lie on, equally many on each, in their order; it divides num_ranks.
        num_groups: of the router's groups of neighbouring experts.
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
