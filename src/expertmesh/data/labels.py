"""Kinds of samples, as directions or the folders they come from, whose use of the experts is recorded apart."""

import logging
from collections.abc import Sequence

MOST_LABELS = 64
"""With more of them the record of a step would be long, and nobody could read it."""
_log = logging.getLogger("expertmesh.data")


def labels_to_record(names: Sequence[str], what: str) -> tuple[str, ...]:
    """The names, if there are several and not too many to tell apart; else none.

    Args:
        names: of the kinds of samples.
        what: they are, in the plural, for the warning when there are too many.
    """
    if len(names) > MOST_LABELS:
        _log.warning(
            "data: has %d %s, and use of the experts is recorded by them for at most %d",
            len(names),
            what,
            MOST_LABELS,
        )
    return tuple(names) if 1 < len(names) <= MOST_LABELS else ()
