"""Guesses of the next tokens from what a sequence has said before, which one step verifies together. Torch-free.

A sequence that repeats its prompt or itself (code, quotations, lists) gets several tokens for one pass through the weights.
A guess is taken where it is what the sequence would have drawn, so that answers are the same as without, drawn ones too:
a draw depends on the seed, the position and the logits alone.
"""

from collections.abc import Sequence as Seq

from expertmesh.engine.request import Sequence, State

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of a sequence that have to occur before it, the most at first."""


class PromptLookup:
    """Where the n-grams of a growing sequence occurred last.

    Example:
        >>> from expertmesh.engine.drafts import PromptLookup
        >>> PromptLookup().guess([7, 8, 9, 1, 7, 8], most=3)
        [9, 1, 7]
    """

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # an n-gram: the place behind it
        self._read = 0

    def guess(self, ids: Seq[int], most: int) -> list[int]:
        """The tokens that followed the last occurrence of the sequence's end; none where there was none.

        Args:
            ids: the sequence, which begins with that of the last call.
            most: tokens, at most. Where fewer followed, they are repeated.
        """
        for place in range(self._read + 1, len(ids)):
            for size in range(SHORTEST, min(LONGEST, place) + 1):
                self._behind[tuple(ids[place - size : place])] = place
        self._read = max(self._read, len(ids) - 1)
        for size in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            begin = self._behind.get(tuple(ids[-size:]))
            if begin is not None:
                period = len(ids) - begin
                return [ids[begin + i % period] for i in range(most)]
        return []


def ahead(sequence: Sequence, ids: Seq[int]) -> tuple[Sequence, ...]:
    """What a sequence is after one, two, ... of some guessed tokens: each has the last of them yet to compute.

    They share its blocks, and so see one another's keys and values, which lie at places of their own.
    """
    found = []
    for count in range(1, len(ids) + 1):
        one = Sequence(
            sequence.request,
            sequence.index,
            state=State.RUNNING,
            is_guessed=True,
            rule=sequence.rule,
        )
        one.token_ids = [*sequence.token_ids, *ids[:count]]
        one.blocks, one.num_computed = sequence.blocks, len(one.token_ids) - 1
        found.append(one)
    return tuple(found)
