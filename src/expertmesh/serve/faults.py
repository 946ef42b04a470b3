"""Errors in OpenAI's format, a status and {"error": {message, type, param, code}}, or in Anthropic's."""

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
_WRONG = "invalid_request_error"
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """Error that is returned to the client."""

    def __init__(
        self,
        status: int,  # HTTP status
        message: str,  # the problem and the fix
        *,
        param: str | None = None,  # name of the field
        code: str | None = None,  # machine-readable code
        details: dict[str, Any] | None = None,  # what clients of Anthropic's interface read to go on
        headers: dict[str, str] | None = None,  # headers of the response
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers
        self.details = details

    def body_at(self, path: str) -> dict[str, Any]:
        """The error as JSON, in the format of a path's interface."""
        if path != _ANTHROPIC and not path.startswith(f"{_ANTHROPIC}/"):
            return self.body
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else _WRONG)
        message = self.body["error"]["message"]
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON, in OpenAI's format."""
        text = " ".join(str(self).split())
        if len(text) > MOST_TEXT:
            text = text[: MOST_TEXT - 3] + "..."
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": text, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        """The error as an HTTP response to a request of a path."""
        return JSONResponse(self.body_at(path), self.status, headers=self.headers)
