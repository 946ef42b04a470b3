"""LRU cache of experts in slots: pure bookkeeping, no tensor is touched."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class PagingCounts:
    """Counters of one layer's expert slots."""

    hits: int = 0  # experts of a step that were in a slot
    misses: int = 0  # experts of a step that had to be copied, in bypassing steps too
    fetched_ahead: int = 0  # experts prefetched before their step
    useful: int = 0  # prefetched experts that their step then used; they count as hits, too
    bypasses: int = 0  # steps that needed more experts than there are slots
    bytes_copied: int = 0  # bytes copied from the host's memory or from files


class ExpertSlots:
    """Map from the experts of one layer to slots; the least recently used expert is evicted.

    Example:
        >>> slots = ExpertSlots(2)
        >>> slots.place([7, 3]), slots.place([3]), slots.place([5])
        ([(7, 0), (3, 1)], [], [(5, 0)])
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # least recently used first

    def __contains__(self, expert: object) -> bool:
        """Whether an expert has a slot."""
        return expert in self._slot_of

    def slot_of(self, expert: int) -> int:
        """Slot of an expert that has one."""
        return self._slot_of[expert]

    def place(self, experts: Iterable[int]) -> list[tuple[int, int]]:
        """Mark experts as used, and give those without a slot one; at most `num_slots` experts.

        Returns:
            (expert, slot) of each expert that has to be copied; the slot's previous expert is evicted.
        """
        wanted = list(dict.fromkeys(experts))
        assert len(wanted) <= self.num_slots, "more experts than slots"
        missing = []
        for expert in wanted:  # hits first, so that placing the misses evicts none of them
            if expert in self._slot_of:
                self._slot_of.move_to_end(expert)
            else:
                missing.append(expert)
        placed = []
        for expert in missing:
            slot = len(self._slot_of)
            if slot == self.num_slots:
                _, slot = self._slot_of.popitem(last=False)
            self._slot_of[expert] = slot
            placed.append((expert, slot))
        return placed

    def forget(self, expert: int) -> None:
        """Remove an expert whose copy failed; its slot is the next to be reused."""
        self._slot_of.move_to_end(expert, last=False)
        slot = self._slot_of.pop(expert)
        # a negative key, which no expert has, holds the slot, so that slot numbers have no gap
        self._slot_of[-1 - slot] = slot
        self._slot_of.move_to_end(-1 - slot, last=False)
