"""Messages as a chat template reads them: their calls in the form that it writes, their reasoning by its names."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from expertmesh.errors import ConfigError
from expertmesh.text.limits import TextLimitError
from expertmesh.text.tools import fitting_id

_NAME, _KEY = "probe8d1f", "key8d1f"
_ASKED = {"role": "user", "content": "a"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_EMPTY: tuple[dict[str, Any], ...] = ({}, {"content": ""}, {"content": None})
_Render = Callable[[list[dict[str, Any]]], str]


class CallForm(NamedTuple):
    """A form of messages with calls.

    Attributes:
        empty: fields of a message that says nothing but its calls: no content, as transformers has it, an empty one, or
            None, by which some of DeepSeek's templates know calls.
    """

    is_text: bool  # whether arguments are JSON text, which DeepSeek's templates join to other text; else objects
    empty: Mapping[str, Any]

    def of(self, message: Mapping[str, Any], id_size: int | None) -> dict[str, Any]:
        """A message with calls in this form."""
        calls = [self._call(call, id_size) for call in message["tool_calls"]]
        said = {**message, "tool_calls": calls}
        if not said.get("content"):
            del said["content"]
            said |= self.empty
        return said

    def _call(self, call: Mapping[str, Any], id_size: int | None) -> dict[str, Any]:
        function = dict(call["function"])
        if self.is_text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**with_fitting(call, "id", id_size), "function": function}


def with_fitting(message: Mapping[str, Any], field: str, size: int | None) -> dict[str, Any]:
    """A message or call whose id of a call has the size that the template wants."""
    given = message.get(field)
    if size is None or not isinstance(given, str):
        return dict(message)
    return {**message, field: fitting_id(given, size)}


def forms_of(render: _Render) -> list[CallForm]:
    """Forms in which a template writes calls whole, best first: objects before text."""
    plain = _written(render, [_ASKED]) or ""
    return [
        form
        for form in (CallForm(text, empty) for text in (False, True) for empty in _EMPTY)
        if _is_whole(_written(render, _probe(form)), plain)
    ]


def _probe(form: CallForm) -> list[dict[str, Any]]:
    call = {
        "id": "8d1fcall0",
        "type": "function",
        "function": {"name": _NAME, "arguments": {_KEY: "a"}},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "name": _NAME, "tool_call_id": call["id"], "content": "a"}
    return [_ASKED, form.of(message, None), answer]


def _written(render: _Render, messages: list[dict[str, Any]]) -> str | None:
    try:
        return render(messages)
    except TextLimitError:
        raise
    except ConfigError:
        return None


def _is_whole(text: str | None, plain: str) -> bool:
    """Whether a text has the call's name and arguments, in JSON and not as Python or twice encoded, and no None."""
    if text is None or text.count("None") > plain.count("None"):
        return False
    return all(one in text for one in (_NAME, _KEY)) and not any(one in text for one in (f"'{_KEY}'", f'\\"{_KEY}'))


def best_form(forms: list[CallForm], message: Mapping[str, Any]) -> CallForm:
    """The form for a message with calls: one with its own empty content where that is among them."""
    own = CallForm(is_text=False, empty=_EMPTY[0] if message["content"] is None else _EMPTY[1])
    return next((one for one in forms if one.empty == own.empty), forms[0] if forms else own)


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for a template, as transformers gives it: no null but as the content beside calls, and its reasoning by
    each name that templates read."""
    said = {k: v for k, v in message.items() if v is not None or (k == "content" and "tool_calls" in message)}
    reasoning = next((said[name] for name in _REASONING if name in said), None)
    if reasoning is None:
        return said
    return {"thinking": reasoning, **said, "reasoning_content": reasoning}
