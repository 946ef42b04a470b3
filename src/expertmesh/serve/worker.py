"""Thread that runs the engine, and its interface to the event loop.

The event loop puts orders into a queue. The thread takes them between steps, and delivers the outputs of a step in one
call. The next step starts once the event loop has written these outputs: if both ran at once, they would contend for
Python's lock and both take longer. An output that has not been taken yet is replaced by its update, so a slow client
holds one output per answer.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from expertmesh.config.sampling import SamplingParams
from expertmesh.engine.engine import Engine
from expertmesh.engine.output import RequestOutput
from expertmesh.engine.stats import EngineStats
from expertmesh.errors import CollectiveError, ConfigError

_MOST_FAILURES = 3
"""Consecutive failed steps after which the engine counts as dead."""
_LOOK_S = 0.5
"""Interval in seconds of the check for lost ranks while the engine is idle."""

log = logging.getLogger("expertmesh.serve")


class EngineFailedError(RuntimeError):
    """The engine failed to compute an answer, or is dead."""


@dataclass(eq=False)
class Ticket:
    """Request of a client: prompts, with n answers to each."""

    prompts: Sequence[Sequence[int]]  # token ids of each prompt
    params: Sequence[SamplingParams]  # sampling parameters of each prompt
    adapter: str | None = None  # name of the adapter; None: the model alone
    _news: dict[int, RequestOutput] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _error: Exception | None = None
    _names: list[str] = field(default_factory=list)  # used by the engine's thread only

    @property
    def num_answers(self) -> int:
        """Total number of answers to all prompts."""
        return sum(params.n for params in self.params)

    def deliver(self, index: int, output: RequestOutput) -> None:
        """Store an update of an answer; called in the event loop."""
        self._news[index] = output
        self._changed.set()

    def failed(self, error: Exception) -> None:
        """End the ticket with an error; called in the event loop."""
        self._error = error
        self._changed.set()

    async def changes(self) -> AsyncIterator[dict[int, RequestOutput]]:
        """Latest output of each updated answer, by index (prompt times n, plus answer), until all have ended."""
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
    """Thread that steps an engine.

    Args:
        observe: called in the event loop with tokens and seconds of each step, for metrics.
        writing_s: longest time in seconds that a step waits for the event loop to write the previous outputs.

    Attributes:
        num_answers: number of answers of open tickets.
    """

    def __init__(
        self,
        engine: Engine,  # the engine, which only this thread uses from now on
        observe: Callable[[int, float], None] | None = None,
        *,
        writing_s: float = 0.1,
        num_threads: int | None = None,  # number of CPU threads of the steps; None: torch's
        left: Callable[[int], None] | None = None,
    ) -> None:
        self.engine, self._left = engine, left
        self.error: str | None = None  # reason why the engine is dead; None: it is alive
        self.is_lost = False  # whether it is dead because a rank was lost
        self._orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._tickets: dict[str, tuple[Ticket, int]] = {}  # used by the thread only: ticket and first index by request
        self._numbers = itertools.count()
        self._is_stopping, self._failures = False, 0
        self._observe = observe
        self._is_written, self._writing_s = threading.Event(), writing_s
        self.num_answers, self._num_threads = 0, num_threads

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; outputs are delivered in this event loop."""
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._orders.put(("stop", None))
        self._thread.join(timeout=60)

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests."""
        return self._thread.is_alive() and self.error is None

    def stats(self) -> EngineStats:
        """Statistics of the engine."""
        return self.engine.stats()

    def submit(self, ticket: Ticket) -> None:
        """Submit a ticket, which must later be closed with `close`."""
        self.num_answers += ticket.num_answers
        self._orders.put(("add", ticket))

    def close(self, ticket: Ticket) -> None:
        """Close a ticket and abort its unfinished answers; their blocks are free before the next step."""
        self.num_answers -= ticket.num_answers
        self._orders.put(("abort", ticket))

    def call(self, function: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Result of a function that runs in the engine's thread, between two steps."""
        call: Future[Any] = Future()
        self._orders.put(("call", (function, call)))
        return asyncio.wrap_future(call)

    def _call(self, function: Callable[[], Any], call: "Future[Any]") -> None:
        if not call.set_running_or_notify_cancel():
            return
        try:
            call.set_result(function())
        except Exception as error:
            call.set_exception(error)
            if isinstance(error, CollectiveError):
                raise

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # of this thread: others have their own
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
            except Exception as error:  # any error: other requests must still be answered
                self._fail(error)

    def _take_orders(self) -> None:
        """Process all queued orders; if the engine is idle, wait for the next one."""
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
            if what == "call":
                self._call(*ticket)
            elif what == "add":
                self._add(ticket)
            else:
                answers = [one for name in ticket._names for one in self.engine.abort(name)]
                if self._left is not None:
                    self._left(sum(one.finish_reason == "abort" for one in answers))
                for name in ticket._names:
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
            if isinstance(error, ConfigError):  # affects this request only
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

    def _hand_out(self, found: list[tuple[Ticket, int, RequestOutput]], num_tokens: int, seconds: float) -> None:
        for ticket, index, output in found:
            ticket.deliver(index, output)
        if self._observe is not None:
            self._observe(num_tokens, seconds)
        # tasks woken above are already in the loop's queue, so they write before this callback
        asyncio.get_running_loop().call_soon(self._is_written.set)

    def _fail(self, error: Exception) -> None:
        """Handle a failed step: its tickets get an error, and the engine continues without them."""
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
            self.engine.update_weights({})  # blocks of the failed step are not reused as prefixes
        except Exception as second:
            self.error = text
            log.error("the engine cannot be emptied", exc_info=second)
        if self.error is not None:
            self._mourn()

    def _mourn(self) -> None:
        """Answer all orders to a dead engine with an error."""
        while not self._is_stopping:
            what, ticket = self._orders.get()
            if what == "stop":
                self._is_stopping = True
            elif what == "call":
                ticket[1].set_exception(EngineFailedError(str(self.error)))
            elif what == "add":
                self._tell(ticket.failed, EngineFailedError(str(self.error)))

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)


def _failure(error: Exception) -> str:
    """Error message for a client about a failure of the engine."""
    return f"the engine failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _num_tokens(engine: Engine) -> int:
    """Number of tokens computed so far, of prompts and answers."""
    stats = engine.stats()
    return stats.num_prompt_tokens + stats.num_generated_tokens
