"""Kinds of samples, as the places they come from, whose use of the experts is recorded apart."""

from collections.abc import Sequence

MOST_LABELS = 64
"""With more of them the record of a step would be long, and nobody could read it."""


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """The names, if there are several and not too many to tell apart; else none."""
    return tuple(names) if 1 < len(names) <= MOST_LABELS else ()
