"""Errors in OpenAI's format: a status and {"error": {message, type, param, code}}."""

from typing import Any

from starlette.responses import JSONResponse

MOST_TEXT = 500
"""Maximum characters of a message, so that client input is never echoed at full length."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Statuses of the server other than 200, and their OpenAI error types."""


class RequestError(Exception):
    """Error that is returned to the client.

    Args:
        status: HTTP status.
        message: the problem and the fix.
        param: name of the field.
        code: machine-readable code.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        text = " ".join(str(self).split())
        if len(text) > MOST_TEXT:
            text = text[: MOST_TEXT - 3] + "..."
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body, self.status, headers=self.headers)
