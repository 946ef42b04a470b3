"""The engine in a thread of its own, and what the event loop sees of it.

The loop puts orders into a queue; the thread takes them between two steps and gives what a step brought back in one call. The
next step begins when the loop has written that out: both would hold Python's lock in turns, and take longer for either. An answer
that nobody has taken yet is replaced by its newer state, so that a slow client holds one answer, not all of its past.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from expertmesh.engine.engine import Engine
from expertmesh.engine.output import RequestOutput
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.stats import EngineStats
from expertmesh.errors import CollectiveError, ConfigError

_MOST_FAILURES = 3
"""Steps in a row that may fail before the engine counts as dead."""
_LOOK_S = 0.5
"""So often it is looked whether other ranks are there while nobody asks anything."""

log = logging.getLogger("expertmesh.serve")


class EngineFailedError(RuntimeError):
    """The engine could not compute an answer, or is dead."""


@dataclass(eq=False)
class Ticket:
    """One request of a client: some prompts, n answers to each.

    Attributes:
        prompts: token ids of each.
        params: of all.
        adapter: that answers; None: the model alone.
        num_answers: of all prompts together.
    """

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    adapter: str | None = None
    _news: dict[int, RequestOutput] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _error: Exception | None = None
    _names: list[str] = field(default_factory=list)  # the thread's

    @property
    def num_answers(self) -> int:
        """Of all prompts together."""
        return sum(params.n for params in self.params)

    def told(self, index: int, output: RequestOutput) -> None:
        """A newer state of an answer; in the event loop."""
        self._news[index] = output
        self._changed.set()

    def failed(self, error: Exception) -> None:
        """No answer comes any more; in the event loop."""
        self._error = error
        self._changed.set()

    async def changes(self) -> AsyncIterator[dict[int, RequestOutput]]:
        """The newest state of answers that changed, by index (prompt times n, plus answer), until all have ended.

        Raises:
            ConfigError: the engine refused the request.
            EngineFailedError: it failed.
        """
        num_left = self.num_answers
        while num_left:
            await self._changed.wait()
            self._changed.clear()
            news, self._news = self._news, {}
            if self._error is not None:
                raise self._error
            num_left -= sum(output.finish_reason is not None for output in news.values())
            yield news


class EngineWorker:
    """A thread that steps an engine.

    Args:
        engine: which nobody else uses from now on.
        observe: called in the event loop with tokens and seconds of each step, for metrics.
        writing_s: a step waits no longer for the event loop to write out the last one.

    Attributes:
        engine: of this thread.
        error: why the engine is dead; None: it lives.
        is_lost: whether it is dead because a rank is gone, without which nothing goes on.
        num_answers: answers of tickets that have not been closed.
    """

    def __init__(
        self,
        engine: Engine,
        observe: Callable[[int, float], None] | None = None,
        *,
        writing_s: float = 0.1,
    ) -> None:
        self.engine = engine
        self.error: str | None = None
        self.is_lost = False
        self._orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._tickets: dict[str, tuple[Ticket, int]] = {}  # the thread's: where an answer goes
        self._numbers = itertools.count()
        self._is_stopping, self._failures = False, 0
        self._observe = observe
        self._is_written, self._writing_s = threading.Event(), writing_s
        self.num_answers = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; answers come in this loop."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is computing."""
        self._orders.put(("stop", None))
        self._thread.join(timeout=60)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and self.error is None

    def stats(self) -> EngineStats:
        """Numbers of the engine."""
        return self.engine.stats()

    def submit(self, ticket: Ticket) -> None:
        """Take a ticket, which has to be closed by `close`."""
        self.num_answers += ticket.num_answers
        self._orders.put(("add", ticket))

    def close(self, ticket: Ticket) -> None:
        """End what is left of a ticket; its blocks are free before the next step."""
        self.num_answers -= ticket.num_answers
        self._orders.put(("abort", ticket))

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._take_orders()
                if self.engine.has_work:
                    before, begin = _num_tokens(self.engine), time.perf_counter()
                    outputs = self.engine.step()
                    seconds = time.perf_counter() - begin
                    self._failures = 0
                    self._is_written.clear()
                    self._deliver(outputs, _num_tokens(self.engine) - before, seconds)
                    self._is_written.wait(self._writing_s)
            except Exception as error:  # whatever it is, the others are to be answered
                self._fail(error)

    def _take_orders(self) -> None:
        """All orders that are there; where there is no work, the next one is waited for."""
        while True:
            is_idle = not self.engine.has_work
            try:
                what, ticket = self._orders.get(block=is_idle, timeout=_LOOK_S)
            except queue.Empty:
                self.engine.check_ranks()
                return
            if what == "stop":
                self._is_stopping = True
                return
            if what == "add":
                self._add(ticket)
            else:
                for name in ticket._names:
                    self.engine.abort(name)
                    self._tickets.pop(name, None)

    def _add(self, ticket: Ticket) -> None:
        if self.error is not None:
            self._tell(ticket.failed, EngineFailedError(self.error))
            return
        index = 0
        try:
            for prompt, params in zip(ticket.prompts, ticket.params, strict=True):
                name = f"server-{next(self._numbers)}"
                self.engine.add(prompt, params, request_id=name, adapter=ticket.adapter)
                ticket._names.append(name)
                self._tickets[name] = ticket, index
                index += params.n
        except Exception as error:
            for name in ticket._names:
                self.engine.abort(name)
                self._tickets.pop(name, None)
            if isinstance(error, ConfigError):  # this request alone
                self._tell(ticket.failed, error)
                return
            self._tell(ticket.failed, EngineFailedError(_failure(error)))
            raise

    def _deliver(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        found = []
        for output in outputs:
            if output.request_id in self._tickets:
                ticket, first = self._tickets[output.request_id]
                found.append((ticket, first + output.index, output))
        self._tell(self._hand_out, found, num_tokens, seconds)

    def _hand_out(
        self, found: list[tuple[Ticket, int, RequestOutput]], num_tokens: int, seconds: float
    ) -> None:
        for ticket, index, output in found:
            ticket.told(index, output)
        if self._observe is not None:
            self._observe(num_tokens, seconds)
        # whom this woke is in the loop's queue already, and writes before this is called
        asyncio.get_running_loop().call_soon(self._is_written.set)

    def _fail(self, error: Exception) -> None:
        """A step failed: who waits for it gets an error, and the engine begins anew without them."""
        self._failures += 1
        text = _failure(error)
        log.error("%s", text, exc_info=error)
        tickets = {id(ticket): ticket for ticket, _ in self._tickets.values()}
        names, self._tickets = list(self._tickets), {}
        self.is_lost = isinstance(error, CollectiveError)
        if self.is_lost or self._failures >= _MOST_FAILURES:
            self.error = text
        for ticket in tickets.values():
            self._tell(ticket.failed, EngineFailedError(text))
        try:
            for name in names:
                self.engine.abort(name)
            self.engine.update_weights({})  # what the step was writing is no known prefix
        except Exception as second:
            self.error = text
            log.error("the engine cannot be emptied", exc_info=second)
        if self.error is not None:
            self._mourn()

    def _mourn(self) -> None:
        """The engine is dead: all that comes is answered with an error."""
        while not self._is_stopping:
            what, ticket = self._orders.get()
            if what == "stop":
                self._is_stopping = True
            elif what == "add":
                self._tell(ticket.failed, EngineFailedError(str(self.error)))

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


def _failure(error: Exception) -> str:
    """What a client is told of a mistake that is not its own."""
    return f"the engine failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _num_tokens(engine: Engine) -> int:
    """Tokens computed so far, of prompts and answers."""
    stats = engine.stats()
    return stats.num_prompt_tokens + stats.num_generated_tokens
