"""Routes whose bodies are JSON in the strict sense: UTF-8, no NaN, no half characters; what is none says why."""

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from expertmesh.serve.faults import RequestError
from expertmesh.text.messages import is_unicode

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of a half character, which may be one of a pair."""


class JsonRoute(APIRoute):
    """Route that parses its body by `parsed_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_body(request: Request) -> Response:
            asked = _ParsedRequest(request.scope, request.receive)
            if await asked.body() and await asked.json() is None:  # older versions of FastAPI take null for no body
                raise RequestError(400, "Input should be an object")
            return await handle(asked)

        return handle_body


class _ParsedRequest(Request):
    """Request whose body is parsed once."""

    _value: Any = None

    async def json(self) -> Any:
        """The value of the body."""
        if self._value is None:
            self._value = parsed_body(await self.body())
        return self._value


def parsed_body(data: bytes) -> Any:
    """Value of a body."""
    odd: list[str] = []

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            odd.append(text)
        return value

    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_float=number, parse_constant=number)
    except UnicodeDecodeError as error:
        raise _no_json(f"it is no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _no_json("its brackets are nested too deeply") from None
    except ValueError:
        raise _no_json("it has a number of too many digits") from None
    if isinstance(value, dict):
        if odd:
            _refuse(value, _is_finite, "has a number that is none, or too large; correct it")
        if _HALF.search(text):
            _refuse(value, is_unicode, "has half a character (a lone surrogate); correct it")
    return value


def _refuse(fields: dict[str, Any], is_right: Callable[[Any], bool], why: str) -> None:
    for name, value in fields.items():
        if not is_right([name, value]):
            shown = name[:60].encode(errors="replace").decode()
            raise RequestError(400, f"{shown}: {why}", param=shown)


def _is_finite(values: Any) -> bool:
    """Whether all numbers in JSON values are finite."""
    left = [values]
    while left:
        value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
    return True


def _no_json(why: str) -> RequestError:
    return RequestError(400, f"the body is no JSON: {why}")
