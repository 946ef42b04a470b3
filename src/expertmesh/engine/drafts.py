"""Draft tokens from prompt lookup: n-grams of the sequence itself, verified together in one step. Torch-free.

A sequence that repeats its prompt or itself (code, quotations, lists) gets several tokens per forward pass. A draft
token is accepted if it equals the token that the sequence samples, which depends only on the seed, the position and the
logits. Answers are therefore the same as without drafts, also with sampling.
"""

from collections.abc import Sequence as Seq

from expertmesh.engine.request import Sequence, State

LONGEST, SHORTEST = 4, 2
"""Lengths of the final n-gram that is looked up in the sequence, longest first."""


class PromptLookup:
    """Index of the last occurrence of each n-gram of a growing sequence.

    Example:
        >>> from expertmesh.engine.drafts import PromptLookup
        >>> PromptLookup().guess([7, 8, 9, 1, 7, 8], most=3)
        [9, 1, 7]
    """

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram: position after it
        self._read = 0

    def guess(self, ids: Seq[int], most: int) -> list[int]:
        """Tokens that followed the last occurrence of the sequence's final n-gram; empty if there is none.

        Args:
            most: maximum number of tokens. If fewer followed, they are repeated.
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
    """States of a sequence after one, two, ... of some draft tokens; each has its last token left to compute.

    They share its block table, so each sees the keys and values of the others, at different positions.
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
