"""Requests of other interfaces as chat completions, and errors in their names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import refuse_unknown
from expertmesh.serve.schema import SPELLED, ChatRequest
from expertmesh.serve.structured_outputs import GUIDE_FIELDS
from expertmesh.serve.wrong_body import best_error

_NO_PLACE = ("n", "max_tokens", "return_routed_experts")
PASSED = frozenset(
    {*SPELLED, *GUIDE_FIELDS, "chat_template_kwargs", "reasoning_effort"} - {*_NO_PLACE, "response_format"}
)
"""Fields of chat completions that every interface takes beside its own."""
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that are refused but for some values, and why."""
_FIRST = re.compile(r"messages\.(\d+)|[a-z_]+")


@dataclass(frozen=True)
class TranslatedRequest:
    """A request as a chat completion."""

    body: dict[str, Any]  # the chat completion
    origins: Sequence[str]  # place of each message in the request
    places: Mapping[str, str]  # names in the request of other fields that have another one

    def chat(self) -> ChatRequest:
        """The checked chat completion."""
        try:
            return ChatRequest.model_validate(self.body)
        except ValidationError as error:
            name, message = best_error(error.errors(), self.body)
            raise RequestError(400, message, param=name) from None

    def own(self, fault: RequestError) -> RequestError:
        """An error in the names of the request."""
        param = fault.param and _FIRST.sub(self._own_name, fault.param, count=1)
        text = str(fault)
        place, colon, rest = text.partition(":")
        if colon and " " not in place:
            text = _FIRST.sub(self._own_name, place, count=1) + colon + rest
        return RequestError(fault.status, text, param=param, code=fault.code, headers=fault.headers)

    def _own_name(self, found: "re.Match[str]") -> str:
        if found[1] is not None:
            number = int(found[1])
            return self.origins[number] if number < len(self.origins) else self.places["messages"]
        return self.places.get(found[0], found[0])

    def asking(self, **fields: Any) -> "TranslatedRequest":
        """A copy with further fields of the chat completion."""
        return replace(self, body=self.body | fields)


def passed(extra: Mapping[str, Any] | None, refused: Refused) -> dict[str, Any]:
    """Fields of a request that chat completions have, too.

    Args:
        extra: fields that the request's model does not have.
        refused: fields of the interface that are not served.
    """
    given = {name: one for name, one in (extra or {}).items() if one is not None}
    for name, (allowed, why) in refused.items():
        if name in given and given.pop(name) not in allowed:
            raise RequestError(400, f"{name}: {why}", param=name)
    refuse_unknown(given, known=PASSED, harmless={"n": (1,)})
    return {name: one for name, one in given.items() if name in PASSED}


def without_nulls(**fields: Any) -> dict[str, Any]:
    """The fields that are set."""
    return {name: one for name, one in fields.items() if one is not None}
