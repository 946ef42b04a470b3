"""Server process: socket, uvicorn, and a graceful shutdown that finishes answers in progress."""

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from expertmesh.config.server import ServerConfig
from expertmesh.errors import ConfigError
from expertmesh.serve.app import ServerApp
from expertmesh.serve.faults import RequestError
from expertmesh.serve.request_ids import HEADER, new_id

log = logging.getLogger("expertmesh.serve")

_HEADER_BYTES = 2**16
_BACKLOG = 2048
"""Connections that may wait to be accepted."""
_LOOK_S = 0.05
_QUIET_S = 10.0
"""Seconds without an error after which connections that find no file descriptor are told of again."""
_LAST_WORDS_S = 3.0
"""Seconds for which `/health` reports a lost rank before the process ends."""


def bind(config: ServerConfig) -> socket.socket:
    """Bound socket; connections are accepted once `serve` listens."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # of names that no resolver can be asked for
        reason = getattr(error, "strerror", None) or "a part of it is empty or too long"
        raise ConfigError("host", config.host, f"is no address of this machine ({reason})", "choose another") from None
    place = None
    try:
        family, kind, protocol, _, address = found[0]
        place = socket.socket(family, kind, protocol)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError as error:
        if place is not None:
            place.close()
        raise ConfigError(
            "port",
            config.port,
            f"cannot be listened on at {config.host} ({error.strerror})",
            "choose another",
        ) from None
    return place


def serve(app: ServerApp, place: socket.socket, on_ready: Callable[[str], None]) -> int:
    """Serve requests until a signal.

    Args:
        on_ready: called with the address once the server accepts requests.

    Returns:
        0 after a first SIGTERM or SIGINT, when all answers in progress have ended; 128 plus the signal after a second
        one; 1 if a rank of the engine was lost.
    """
    settings: dict[str, Any] = {
        "http": _Protocol,
        "ws": "none",
        "loop": "asyncio",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": max(1, round(app.config.idle_s)),
        "timeout_graceful_shutdown": 1,
        "h11_max_incomplete_event_size": _HEADER_BYTES,
        # accepted at a time: with no file descriptor left, asyncio begins a timer for each, and each begins as many
        "backlog": 1,
    }
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # each connection takes a file descriptor
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()  # loaded objects stay; a collection over them would stop all threads for 0.2 s
    server = _Server(uvicorn.Config(app.asgi, **settings), app, on_ready)
    server.run(sockets=[place])
    return server.code


class _Protocol(H11Protocol):
    """uvicorn's HTTP protocol with a timeout for idle connections and incomplete heads."""

    idle_s = 30.0

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of a new connection."""
        super().connection_made(transport)
        self._patience = self.loop.call_later(self.idle_s, self._give_up)

    def data_received(self, data: bytes) -> None:
        """Read, and start the timeout where the head of a further request has begun."""
        super().data_received(data)
        if self._is_answering:
            self._patience.cancel()
        elif self._patience.cancelled():
            self._patience = self.loop.call_later(self.idle_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._patience.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, or a head of more than 64 KiB, with an error in OpenAI's format."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else there is an answer already
            head = {"connection": "close", HEADER.decode(): new_id().decode()}
            fault = RequestError(400, msg, code="invalid_http", headers=head)
            answer = fault.response()
            begin = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (begin, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                if (data := self.conn.send(event)) is not None:
                    self.transport.write(data)
        if self._is_answering:  # whose answer has no place any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown of its own.

    Attributes:
        code: exit code of the process.
    """

    def __init__(self, config: uvicorn.Config, app: ServerApp, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._app, self._on_ready, self.code = app, on_ready, 0
        self._full_s = -math.inf  # time at which a connection last found no file descriptor
        self._ending: asyncio.Task[None] | None = None
        _Protocol.idle_s = app.config.idle_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and listen."""
        assert sockets is not None
        self._app.start()
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        sockets[0].listen(_BACKLOG)
        host, port = sockets[0].getsockname()[:2]
        self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop; one line for connections that find no file descriptor one after another."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        before, self._full_s = self._full_s, loop.time()
        if self._full_s > before + _QUIET_S:
            log.warning("no more connections (%s): others wait; raise the limit (ulimit -n)", error.strerror)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop uvicorn, then the engine."""
        await super().shutdown(sockets)
        if not self.force_exit:
            self._app.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one drains the server, the second one ends the process."""
        if self._app.gate.is_draining:
            log.warning("a second signal: answers are cut")
            logging.shutdown()
            os._exit(128 + sig)
        self._app.gate.is_draining = True
        log.info(
            "%s: answers that have begun are finished, new requests get 503",
            signal.Signals(sig).name,
        )

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: no request is in progress any more, or draining has timed out."""
        if self._app.gate.is_draining and self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        if self._app.worker.is_lost and not self.code:
            self.code = 1
            self._ending = asyncio.get_running_loop().create_task(self._say_last_words())
        return await super().on_tick(counter)

    async def _say_last_words(self) -> None:
        await asyncio.sleep(_LAST_WORDS_S)
        self.should_exit = True

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._app.config.drain_s
        while self._app.gate.num_open and loop.time() < end:
            await asyncio.sleep(_LOOK_S)
        if self._app.gate.num_open:
            log.warning("%d answers did not end in time and are cut", self._app.gate.num_open)
        self.should_exit = True
