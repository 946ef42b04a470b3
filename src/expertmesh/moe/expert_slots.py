"""Which expert lies in which slot: least recently used out. Pure bookkeeping; no tensor is touched."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class PagingCounts:
    """What the slots of a layer have seen so far.

    Attributes:
        hits: experts of a step that were there.
        misses: experts of a step that had to be copied, those of long steps that went past the slots among them.
        fetched_ahead: experts that were copied before their step asked for them.
        useful: of these, those that the step then asked for; they count as hits, too.
        bypasses: steps that needed more experts than there are slots.
        bytes_copied: from the host's memory.
    """

    hits: int = 0
    misses: int = 0
    fetched_ahead: int = 0
    useful: int = 0
    bypasses: int = 0
    bytes_copied: int = 0


class ExpertSlots:
    """The slots of one layer.

    Args:
        num_slots: how many.

    Example:
        >>> slots = ExpertSlots(2)
        >>> slots.place([7, 3]), slots.place([3]), slots.place([5])
        ([(7, 0), (3, 1)], [], [(5, 0)])
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # the least recently used first

    def __contains__(self, expert: object) -> bool:
        """Whether an expert has a slot."""
        return expert in self._slot_of

    def slot_of(self, expert: int) -> int:
        """The slot of an expert that has one."""
        return self._slot_of[expert]

    def place(self, experts: Iterable[int]) -> list[tuple[int, int]]:
        """Use experts, no more than there are slots.

        Returns:
            (expert, slot) of those that have to be copied; what was there is out.
        """
        wanted = list(dict.fromkeys(experts))
        assert len(wanted) <= self.num_slots, "more experts than slots"
        missing = []
        for expert in wanted:  # first, so that none of them goes out
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
        """Take an expert out whose copy failed; its slot is the first to be used again."""
        self._slot_of.move_to_end(expert, last=False)
        slot = self._slot_of.pop(expert)
        # a name that no expert has keeps the slots numbered without a gap
        self._slot_of[-1 - slot] = slot
        self._slot_of.move_to_end(-1 - slot, last=False)
