"""HTTP response of a request: whole or as an event stream, aborted when the client disconnects."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from expertmesh.engine.grammar import PROBLEMS
from expertmesh.engine.output import RequestOutput
from expertmesh.errors import ConfigError
from expertmesh.serve.faults import RequestError
from expertmesh.serve.worker import EngineFailedError, EngineWorker, Ticket

WITHOUT_EFFECT = "x-without-effect"
"""Header with the fields of a request that pass because one body must do for all models, and have no effect on this
one."""
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters at which clients that read lines of Unicode break an event, and their escapes."""


class AnswerWriter(Protocol):
    """Format of the answers to one request."""

    @property
    def is_named(self) -> bool:
        """Whether events of a stream have names, which are their types; else it ends with `[DONE]`."""
        ...

    def whole(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Response with complete answers."""
        ...

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Stream events for an update of an answer; empty if nothing is new."""
        ...

    def last(self) -> list[dict[str, Any]]:
        """Final events of a stream."""
        ...

    def failed(self, fault: RequestError) -> list[dict[str, Any]]:
        """Final events of a stream that an error ends."""
        ...


class Answer(Response):
    """Response that submits its ticket when it is sent, and closes the ticket in any case."""

    def __init__(
        self,
        worker: EngineWorker,  # thread of the engine
        ticket: Ticket,  # ticket of the request, not yet submitted
        writer: AnswerWriter,  # formats the answer
        *,
        is_stream: bool,  # whether to send an event stream
        without_effect: Sequence[str] = (),  # fields of the request that the model does not know, named in a header
        admit: Callable[[Ticket], None],  # raises RequestError if the server has no room
        watch: Callable[[dict[int, RequestOutput]], None],  # called with each update of an answer, for metrics
    ) -> None:
        super().__init__()
        self._worker, self._ticket, self._writer = worker, ticket, writer
        self._is_stream, self._admit, self._watch = is_stream, admit, watch
        self._more = {WITHOUT_EFFECT: ", ".join(without_effect)} if without_effect else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer until it has ended or the client has disconnected."""
        self._admit(self._ticket)
        self._worker.submit(self._ticket)
        work = self._stream(send) if self._is_stream else self._whole(scope, receive, send)
        sending = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._worker.close(self._ticket)
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        await asyncio.gather(sending, return_exceptions=True)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        last: dict[int, RequestOutput] = {}
        try:
            async for news in self._ticket.changes():
                self._watch(news)
                last |= news
        except (ConfigError, EngineFailedError) as error:
            raise _as_fault(error) from error
        _check(last)
        body = await asyncio.to_thread(self._writer.whole, last)
        await JSONResponse(body, headers=self._more)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send events; the response head is sent with the first event, so that a refusal still has its status."""
        has_begun = False

        async def begin() -> None:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *((name.encode(), value.encode()) for name, value in self._more.items()),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

        try:
            async for news in self._ticket.changes():
                self._watch(news)
                _check(news)
                events = [c for i in sorted(news) for c in self._writer.chunks(i, news[i])]
                if not has_begun:
                    await begin()
                    has_begun = True
                if events:
                    await _send_body(send, self._written(events))
        except (ConfigError, EngineFailedError, RequestError) as error:
            fault = _as_fault(error)
            if not has_begun:
                raise fault from error
            await _send_body(send, self._written(self._writer.failed(fault), is_end=True), more=False)
            return
        await _send_body(send, self._written(self._writer.last(), is_end=True), more=False)

    def _written(self, events: Iterable[dict[str, Any]], *, is_end: bool = False) -> bytes:
        is_named = self._writer.is_named
        found = b"".join(_event(one, is_named=is_named) for one in events)
        return found if is_named or not is_end else found + b"data: [DONE]\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(value: dict[str, Any], *, is_named: bool) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for end, escape in _LINE_ENDS.items():
        text = text.replace(end, escape)
    name = f"event: {value['type']}\n" if is_named else ""
    return f"{name}data: {text}\n\n".encode()


def _as_fault(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ConfigError):
        if error.option == "adapter":  # it was unloaded while the request was read
            return RequestError(404, f"model: {error}", param="model", code="model_not_found")
        return RequestError(400, str(error), param=error.option)
    return RequestError(500, str(error))


def _check(outputs: dict[int, RequestOutput]) -> None:
    """Raise RequestError if an answer could not be computed."""
    for output in outputs.values():
        if output.finish_reason == "error":
            said = output.error or "the answer could not be computed"
            raise RequestError(400 if said.startswith(PROBLEMS) else 500, said)
