"""ASGI middleware in front of all requests: API keys, body size, timeouts, and draining."""

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

OPEN_PATHS = ("/", "/health", "/ping")
"""Paths answered without a key: the page, which asks for one, and the health check."""
_BODY_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/tokenize",
    "/detokenize",
)
_EMPTY_PATHS = ("/reset_prefix_cache",)
"""Paths that take no body, so that a browser would send their requests from any page."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Gate:
    """ASGI middleware that checks requests and reads whole bodies within bounds, so that the app sees disconnects.

    Args:
        keys: accepted API keys; empty: no key is needed.

    Attributes:
        is_draining: whether new requests are refused, because the server is shutting down.
        num_open: number of requests in progress.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: Sequence[str] = ()) -> None:
        self._app, self._config = app, config
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._names = {*_LOCAL_NAMES, config.host, *map(str.lower, config.allow_host)}
        self.is_draining, self.num_open = False, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, begin, status = scope["method"], time.perf_counter(), 0
        scope = _plain(scope)

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
                await fault.response(scope["path"])(scope, receive, watched)
            except _ClientGoneError:
                pass
            except Exception as error:
                log.error("request failed", exc_info=error)
                if not status:
                    failed = RequestError(500, "the server failed; its log says why")
                    await failed.response(scope["path"])(scope, receive, watched)
        finally:
            self.num_open -= 1
            if self._config.access_log:
                seconds = time.perf_counter() - begin
                client = (scope.get("client") or ("-",))[0]
                path = scope["path"][:200].encode("unicode_escape").decode()
                log.info("%s %s %s %d %.3fs", client, method, path, status, seconds)

    def _check(self, scope: Scope) -> None:
        """Raise RequestError unless the request is allowed."""
        headers = dict(scope["headers"])
        path = scope["path"]
        if not self._keys and self._config.is_local:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._names:  # DNS rebinding from another site's page
                raise RequestError(
                    403,
                    "host: must be that of this machine; other names need --allow-host NAME, or a server with a key",
                )
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise RequestError(
                400,
                "content-length: is given beside transfer-encoding; leave one out",
                code="invalid_http",
                headers={"connection": "close"},
            )
        if self._keys and path not in OPEN_PATHS and not self._has_key(headers):
            raise RequestError(
                401,
                "authorization: must be `Bearer KEY` (or x-api-key: KEY) with a key of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self.is_draining and path not in ("/health", "/ping", "/metrics"):
            raise RequestError(
                503,
                "the server is ending; ask another one",
                headers={"retry-after": "1", "connection": "close"},
            )
        if scope["method"] == "POST" and path in _BODY_PATHS:
            kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0]
            if kind.strip().lower() != "application/json":
                raise RequestError(415, "content-type: must be application/json")
            if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
                raise RequestError(415, "content-encoding: must be identity; send the body as it is")
        if scope["method"] == "POST" and path in _EMPTY_PATHS and b"origin" in headers:
            raise RequestError(403, "origin: pages may not send this request")

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request has one of the keys, compared in constant time."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        bearer = given if scheme.lower() == b"bearer" else b""
        found = False
        for one in (bearer, headers.get(b"x-api-key", b"")):
            digest = hashlib.sha256(one.strip()).digest()
            for key in self._keys:
                found |= secrets.compare_digest(digest, key)
        return found

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Body of the request, within size and time bounds."""
        most = self._config.max_body_bytes
        fault = RequestError(413, f"the body has more than {most} bytes", headers={"connection": "close"})
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


def _plain(scope: Scope) -> Scope:
    """A request with HEAD as one with GET, whose body uvicorn leaves out, and with a whole address, or slashes at the
    end, as a path."""
    path = scope["path"]
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": path.rstrip("/") or "/"}


class _ClientGoneError(Exception):
    """The client has disconnected."""


def _replayed(body: bytes, receive: Receive) -> Receive:
    """ASGI receive function that returns a body already read, then further messages."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again
