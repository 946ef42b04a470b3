"""What every request passes first: keys, size, time, and whether the server still takes any."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertmesh.config.server import ServerConfig
from expertmesh.serve.faults import RequestError

log = logging.getLogger("expertmesh.serve")

OPEN_PATHS = ("/", "/health")
"""Answered without a key: the page, which asks for one, and what load balancers ask."""
_BODY_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Gate:
    """Plain ASGI: a wrapper that reads bodies whole, within bounds, so that disconnects are seen behind it.

    Args:
        app: behind it.
        config: of the server.
        keys: that clients send; none: all are answered.

    Attributes:
        is_draining: whether new requests are refused, as the server ends.
        num_open: requests that are being answered.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Sequence[str] = ()) -> None:
        self._app, self._config = app, config
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.is_draining, self.num_open = False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.num_open += 1
        try:
            try:
                self._check(scope)
                whole = await self._read(scope, receive)
                await self._app(scope, _replayed(whole, receive), watched)
            except RequestError as fault:
                if status:
                    raise
                await fault.response()(scope, receive, watched)
            except _ClientGoneError:
                pass
            except Exception as error:
                log.error("request failed", exc_info=error)
                if not status:
                    failed = RequestError(500, "the server failed; its log says why")
                    await failed.response()(scope, receive, watched)
        finally:
            self.num_open -= 1
            if self._config.access_log:
                seconds = time.perf_counter() - begin
                client = (scope.get("client") or ("-",))[0]
                path = scope["path"][:200].encode("unicode_escape").decode()
                log.info("%s %s %s %d %.3fs", client, scope["method"], path, status, seconds)

    def _check(self, scope: Scope) -> None:
        """Raise RequestError unless the request may be answered."""
        headers = dict(scope["headers"])
        path = scope["path"]
        if not self._keys and self._config.is_local:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in (
                *_LOCAL_NAMES,
                self._config.host,
            ):  # a page of another site, by a name that leads here
                raise RequestError(
                    403, "host: must be that of this machine; other names need a server with a key"
                )
        if self._keys and path not in OPEN_PATHS and not self._has_key(headers):
            raise RequestError(
                401,
                "authorization: must be `Bearer KEY` with a key of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self.is_draining and path not in ("/health", "/metrics"):
            raise RequestError(
                503,
                "the server is ending; ask another one",
                headers={"retry-after": "1", "connection": "close"},
            )
        if scope["method"] == "POST" and path in _BODY_PATHS:
            kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
            if kind.strip().lower() != "application/json":
                raise RequestError(415, "content-type: must be application/json")

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request has one of the keys; takes as long whichever it is."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        found = False
        for key in self._keys:
            found |= secrets.compare_digest(digest, key)
        return found and scheme.lower() == b"bearer"

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body, within its bounds."""
        most = self._config.max_body_bytes
        fault = RequestError(
            413, f"the body has more than {most} bytes", headers={"connection": "close"}
        )
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            raise fault
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._config.idle_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise fault
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestError(
                408,
                f"the body did not come within {self._config.idle_s:g} s",
                headers={"connection": "close"},
            ) from None


class _ClientGoneError(Exception):
    """Nobody waits for the answer."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What gives a body that has been read, then what follows it."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
