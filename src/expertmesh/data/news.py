"""How far a long preparation is, for whoever listens to the logger `expertmesh.data` at level INFO.

Records of progress have the attribute `is_progress`, so that a terminal can show the last one only.
"""

import logging
import time

EVERY_S = 1.0

_log = logging.getLogger("expertmesh.data")


class Progress:
    """Says every second how many bytes are done.

    Args:
        verb: what is done to them, as in "read" or "tokenised".
        total: how many there are; None: unknown.
    """

    def __init__(self, verb: str, *, total: int | None = None) -> None:
        self._verb, self._total = verb, total
        self._said = time.monotonic()

    def at(self, num_bytes: int) -> None:
        """So many are done."""
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        of = "" if self._total is None else f" of {self._total / 1e6:,.1f}"
        _log.info(
            "%s %s%s MB of text",
            self._verb,
            f"{num_bytes / 1e6:,.1f}",
            of,
            extra={"is_progress": True},
        )

    def finish(self) -> None:
        """What a terminal shows of it may go."""
        _log.info("", extra={"is_progress": True})
