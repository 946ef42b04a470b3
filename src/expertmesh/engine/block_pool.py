"""Block pool of the paged KV cache: reference counts of blocks, and an index of cached prefixes. Torch-free.

A block is free (no valid content), used (in at least one block table) or cached (in none, but its content is a known
prefix that a later request may reuse). free + used + cached is always the number of blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

ROOT = -1
"""Parent of the first block of a request without an adapter; adapters have smaller numbers."""


class Prefix(NamedTuple):
    """Key of a full block: its tokens after another prefix.

    Prefixes are compared by the unique number of their parent and by token ids, not by a hash alone, so hash collisions
    cannot match.
    """

    parent: int  # number of the parent prefix, or ROOT
    ids: tuple[int, ...]  # token ids of the block, block_size of them


class BlockPool:
    """Reference counts, free list, and prefix index of the blocks.

    Example:
        >>> pool = BlockPool(4, block_size=2)
        >>> first, second = pool.take(), pool.take()
        >>> _ = pool.seal(first, ROOT, (7, 8))
        >>> pool.release(first)
        >>> pool.match((7, 8, 9), most=2)
        [0]
    """

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, tuple[Prefix, int]] = {}  # prefix and number of each sealed block
        self._next_number = 0

    @property
    def num_free(self) -> int:
        """Number of blocks without valid content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of unused blocks that hold a known prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks in block tables."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` can return."""
        return self.num_free + self.num_cached

    def take(self, *, after: int | None = None) -> int:
        """Allocate a block; if none is free, the least recently used cached block is evicted."""
        if after is not None and after + 1 in self._free:
            block = after + 1
            del self._free[block]
        elif self._free:
            block = next(iter(self._free)) if after is not None else self._roomiest()
            del self._free[block]
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("every block is held")
        self.references[block] = 1
        return block

    def _roomiest(self) -> int:
        """Free block with many free blocks after it, where a new table and its neighbours can grow contiguously."""
        free = sorted(self._free)
        starts = [i for i, block in enumerate(free) if i == 0 or block != free[i - 1] + 1]
        _, start, stop = max((b - a, a, b) for a, b in pairwise([*starts, len(free)]))
        # the middle of a gap: its start is left to the table before it
        return free[start] if free[start] == 0 else free[(start + stop) // 2]

    def share(self, block: int) -> None:
        """Increment the reference count of a block; a cached block becomes used."""
        if self.references[block] == 0:
            del self._cached[block]  # a KeyError for a free block, which has no content
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Decrement the reference count of a block; an unused block with a known prefix becomes cached."""
        self.references[block] -= 1
        assert self.references[block] >= 0, f"block {block} was held by nobody"
        if self.references[block] == 0:
            kept = self._cached if block in self._prefix_of else self._free
            kept[block] = None

    def release_all(self, blocks: list[int]) -> None:
        """Release all blocks of a table, last first, so that starts of prefixes are evicted last; the table is
        emptied."""
        while blocks:
            self.release(blocks.pop())

    def seal(self, block: int, parent: int, ids: Sequence[int]) -> int:
        """Register the content of a full block, so that later requests can find it.

        Args:
            block: a block of the caller, never written again.

        Returns:
            The number of this prefix. If another block is registered for it, that block is kept.
        """
        prefix = Prefix(parent, tuple(ids))
        assert len(prefix.ids) == self.block_size, "only full blocks are sealed"
        known = self._block_of.get(prefix)
        if known is not None:
            return self._prefix_of[known][1]
        number, self._next_number = self._next_number, self._next_number + 1
        self._block_of[prefix] = block
        self._prefix_of[block] = prefix, number
        return number

    def number(self, block: int) -> int | None:
        """Number of a block's prefix; None: the block is not registered."""
        sealed = self._prefix_of.get(block)
        return None if sealed is None else sealed[1]

    def match(self, ids: Sequence[int], *, most: int, root: int = ROOT) -> list[int]:
        """Blocks of the longest known prefix of some tokens; the caller must `share` them."""
        found: list[int] = []
        parent, size = root, self.block_size
        for start in range(0, min(most, len(ids)) // size * size, size):
            block = self._block_of.get(Prefix(parent, tuple(ids[start : start + size])))
            if block is None:
                break
            found.append(block)
            parent = self._prefix_of[block][1]
        return found

    def forget_all(self) -> None:
        """Drop all prefixes, as after a change of weights; used blocks remain used."""
        for block in list(self._prefix_of):
            self._forget(block)
        self._free.update(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        prefix, _ = self._prefix_of.pop(block)
        del self._block_of[prefix]
