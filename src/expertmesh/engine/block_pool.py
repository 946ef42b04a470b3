"""The blocks of a paged key-value cache: who holds which, and which prefixes their contents are. Torch-free.

A block is free (no content that counts), used (held by at least one table) or cached (held by none, but its content is a
known prefix, which the next request may take up again). free + used + cached is always the number of blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ROOT = -1
"""The prefix before the first block of a request without an adapter; with one it is a number below."""


@dataclass(frozen=True)
class Prefix:
    """What a full block holds: its tokens behind another prefix.

    Prefixes are compared by the number of the one before them, which is never used twice, and by their ids: a hash that
    collides finds nothing.

    Attributes:
        parent: number of the prefix before, or ROOT.
        ids: token ids of the block, as many as its size.
    """

    parent: int
    ids: tuple[int, ...]


class BlockPool:
    """Reference counts, the free list, and the index of prefixes.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens of a block.

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
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first was used longest ago
        self._block_of: dict[Prefix, int] = {}
        self._prefix_of: dict[
            int, tuple[Prefix, int]
        ] = {}  # of a sealed block: its prefix and number
        self._next_number = 0

    @property
    def num_free(self) -> int:
        """Blocks without content that counts."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, with the content of a known prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that a table holds."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return self.num_free + self.num_cached

    def take(self, *, after: int | None = None) -> int:
        """A block of one's own, without content; the prefix that was used longest ago is forgotten where none is free.

        Args:
            after: the block that lies before the wanted one, so that tables are contiguous where they can be.

        Raises:
            IndexError: every block is held.
        """
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
        """A free block with many behind it: where a table begins, so that it and its neighbour's can grow in one piece."""
        free = sorted(self._free)
        starts = [i for i, block in enumerate(free) if i == 0 or block != free[i - 1] + 1]
        _, start, stop = max((b - a, a, b) for a, b in pairwise([*starts, len(free)]))
        # in the middle of a gap, whose beginning is for the table before it
        return free[start] if free[start] == 0 else free[(start + stop) // 2]

    def share(self, block: int) -> None:
        """Hold a block once more; one that was cached is used again."""
        if self.references[block] == 0:
            del self._cached[block]  # a free block has nothing to share
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Hold a block once less; the last holder leaves its prefix in the cache."""
        self.references[block] -= 1
        assert self.references[block] >= 0, f"block {block} was held by nobody"
        if self.references[block] == 0:
            kept = self._cached if block in self._prefix_of else self._free
            kept[block] = None

    def release_all(self, blocks: list[int]) -> None:
        """Release a table, its end first, so that the beginnings of prefixes outlive their ends; the table is emptied."""
        while blocks:
            self.release(blocks.pop())

    def seal(self, block: int, parent: int, ids: Sequence[int]) -> int:
        """Say what a full block holds, so that later requests find it.

        Args:
            block: held by the caller, and never written again.
            parent: number of the prefix before it, as `seal` or `number` gave it, or ROOT.
            ids: its tokens.

        Returns:
            The number of this prefix. Where another block holds the same one, that block stays the one that is found.
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
        """The number of a block's prefix; None: it is not the one that is found for it."""
        sealed = self._prefix_of.get(block)
        return None if sealed is None else sealed[1]

    def match(self, ids: Sequence[int], *, most: int, root: int = ROOT) -> list[int]:
        """Blocks whose contents are the longest known prefix of some tokens; the caller has yet to `share` them.

        Args:
            ids: tokens.
            most: tokens that may be found; only whole blocks are.
            root: the prefix before the first of them.
        """
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
        """Forget every prefix, as after a change of weights; blocks that are held stay held."""
        for block in list(self._prefix_of):
            self._forget(block)
        self._free.update(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        prefix, _ = self._prefix_of.pop(block)
        del self._block_of[prefix]
