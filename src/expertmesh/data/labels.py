"""Labels of samples, such as directions of translation or source folders, by which use of the experts is recorded."""

import logging
from collections.abc import Sequence

MOST_LABELS = 64
"""Largest number of labels; with more, a step's record would be too long to read."""
_log = logging.getLogger("expertmesh.data")


def labels_to_record(names: Sequence[str], what: str) -> tuple[str, ...]:
    """The labels, if there are 2 to `MOST_LABELS`; else none."""
    if len(names) > MOST_LABELS:
        _log.warning(
            "data: has %d %s, and use of the experts is recorded by them for at most %d",
            len(names),
            what,
            MOST_LABELS,
        )
    return tuple(names) if 1 < len(names) <= MOST_LABELS else ()
