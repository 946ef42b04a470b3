"""Incremental text of an answer: whole characters, cut at the first stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from expertmesh.text.stream import TextStream


class AnswerText:
    """Text of an answer, and detection of stop strings."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], kept: Sequence[int] = ()) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer, kept)
        self._stops, self._most = tuple(stops), max(map(len, stops), default=0)
        self.text = ""  # the text so far
        self.stop: str | None = None  # the stop string that has ended it; None: none has
        self._first = 0  # stop strings are searched from here on

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop is not None

    def feed(self, token_id: int, *, may_stop: bool = True) -> None:
        """Append a token; a completed stop string ends the text, the earliest one if there are several.

        Args:
            may_stop: whether stop strings are active yet; text before them is never searched.
        """
        if self._stream is not None and not self.is_stopped:
            self._append(self._stream.feed(token_id), may_stop=may_stop)

    def finish(self) -> None:
        """Finish the text; an incomplete character becomes U+FFFD."""
        if self._stream is not None and not self.is_stopped:
            self._append(self._stream.finish(), may_stop=True)

    @property
    def settled(self) -> str:
        """Text that later tokens cannot remove: all except a possible start of a stop string."""
        if self.is_stopped:
            return self.text
        for size in range(min(self._most - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return self.text[:-size]
        return self.text

    def _append(self, piece: str, *, may_stop: bool) -> None:
        begin = max(len(self.text) - self._most + 1, self._first)
        self.text += piece
        if not may_stop:
            self._first = len(self.text)
            return
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        if found:
            first, self.stop = min(found)
            self.text = self.text[:first]
