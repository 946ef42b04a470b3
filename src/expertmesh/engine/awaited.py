"""Answers of requests that iterators await: whoever makes the steps, none is lost, and none is computed for nobody."""

import functools
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar, cast

from expertmesh.engine.output import RequestOutput

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])


def one_at_a_time(method: M) -> M:
    """Decorator: the method runs under its object's `lock`, so that calls of several threads take turns."""

    @functools.wraps(method)
    def locked(self: Any, *args: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *args, **options)

    return cast(M, locked)


class AnswerIterator(Iterator[T]):
    """Iterator that ends what it still awaits when it is closed, dropped or fails, also before its first answer.

    A generator cannot: one that never began runs no `finally`.

    Args:
        end: ends what is still awaited; may be called again.
    """

    def __init__(self, answers: Iterator[T], end: Callable[[], object]) -> None:
        self._answers, self._end = answers, end

    def __next__(self) -> T:
        """Next answer."""
        try:
            return next(self._answers)
        except BaseException:  # also at its end
            self.close()
            raise

    def close(self) -> None:
        """End what is still awaited; there are no more answers."""
        self._answers = iter(())
        self._end()

    def __del__(self) -> None:
        """Close it."""
        self.close()


class Awaited:
    """Latest outputs of the requests that iterators await, and last outputs of others that ended in steps of iterators.

    Args:
        lock: under which the engine's steps run.
    """

    def __init__(self, unfinished: Container[str], lock: "threading.RLock") -> None:
        self._unfinished, self._lock = unfinished, lock
        self._latest: dict[str, dict[int, RequestOutput]] = {}
        self._kept: list[RequestOutput] = []

    def __contains__(self, name: str) -> bool:
        """Whether an iterator awaits the request, or an output of it is kept."""
        return name in self._latest or any(one.request_id == name for one in self._kept)

    @property
    def has_kept(self) -> bool:
        """Whether any output is kept."""
        return bool(self._kept)

    def keep(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep the last outputs of answers that no iterator awaits, until `take`."""
        over = [one for one in outputs if one.finish_reason is not None]
        self._kept += [one for one in over if one.request_id not in self._latest]

    def take(self) -> list[RequestOutput]:
        """Kept outputs, which are kept no longer."""
        taken, self._kept = self._kept, []
        return taken

    def take_of(self, name: str) -> list[RequestOutput]:
        """Kept outputs of a request, which are kept no longer."""
        taken = [one for one in self._kept if one.request_id == name]
        self._kept = [one for one in self._kept if one.request_id != name]
        return taken

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep the outputs of a step, or of an abort, that an iterator awaits."""
        for output in outputs:
            if output.request_id in self._latest:
                self._latest[output.request_id][output.index] = output

    def as_they_end(
        self, names: Sequence[str], *, step: Callable[[], object], abort: Callable[[str], object]
    ) -> AnswerIterator[tuple[int, list[RequestOutput]]]:
        """Index and answers of each request, in the order of their ends."""
        self._latest |= {name: {} for name in names}

        def ended() -> Iterator[tuple[int, list[RequestOutput]]]:
            left = dict(enumerate(names))
            while left:
                with self._lock:
                    places = [place for place, name in left.items() if name not in self._unfinished]
                    over = [(place, self._latest.pop(left.pop(place))) for place in places]
                for place, latest in over:
                    yield place, [latest[index] for index in sorted(latest)]
                if not over:
                    step()

        return AnswerIterator(ended(), lambda: self._drop(names, abort))

    def streamed(
        self, name: str, *, step: Callable[[], object], abort: Callable[[str], object]
    ) -> AnswerIterator[RequestOutput]:
        """Answers of a request so far, after each step with new tokens; steps that others made count as one."""
        latest = self._latest[name] = {}

        def streamed() -> Iterator[RequestOutput]:
            while True:
                with self._lock:
                    if not latest and name in self._unfinished:
                        step()
                    outputs, is_over = list(latest.values()), name not in self._unfinished
                    latest.clear()
                yield from outputs
                if is_over and not latest:
                    return

        return AnswerIterator(streamed(), lambda: self._drop([name], abort))

    def _drop(self, names: Sequence[str], abort: Callable[[str], object]) -> None:
        for name in names:
            if self._latest.pop(name, None) is not None:
                abort(name)
