"""Header x-request-id: every answer has the client's, or a new one."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_ID = re.compile(rb"[A-Za-z0-9._:~+/=@-]{1,128}")


def new_id() -> bytes:
    """A new id."""
    return uuid.uuid4().hex.encode()


class RequestIds:
    """ASGI middleware that names every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; an id of other characters, or of more than 128, is replaced."""
        given = dict(scope.get("headers", ())).get(HEADER, b"")
        name = given if _ID.fullmatch(given) else new_id()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, name)]}
            await send(message)

        await self._app(scope, receive, named)
