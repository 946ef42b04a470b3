"""Formats of the model's thoughts and calls, from its chat template or the server's options."""

from collections.abc import Collection, Iterable, Sequence

from expertmesh.config.server import ServerConfig
from expertmesh.serve.tool_fields import ToolUse
from expertmesh.text.answer_formats import JSON, AnswerFormat, AnswerReading, format_of
from expertmesh.text.format import TextFormat
from expertmesh.text.tokenizer import special_ids

_TAIL = 64
"""Last tokens of a prompt in which the mark of an open thought is looked for."""


class AnswerMarks:
    """Marks of a model's answers. `config`: options of the server, which may name formats."""

    def __init__(self, text: TextFormat, config: ServerConfig) -> None:
        self._tokenizer = text.tokenizer
        template = text.chat.source if text.can_chat else ""
        self._thoughts = format_of("thoughts", template, config.reasoning_parser)
        self._calls = format_of("calls", template, config.tool_call_parser)
        self._specials = special_ids(text.tokenizer)

    def is_open(self, prompt: Sequence[int], said: str) -> bool | None:
        """Whether an answer begins within a thought; None: it has no thoughts."""
        if self._thoughts is None or self._thoughts.thoughts is None:
            return None
        tail = self._tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        syntax = self._thoughts.thoughts
        return None if syntax.is_over(tail) else syntax.is_open(tail, said)

    def reading(
        self, use: ToolUse, *, splits: bool, is_open: bool | None, guides: Collection[str] = ()
    ) -> AnswerReading:
        """Maker of the parsers of answers. Guided calls have a syntax that has a markup: the model's own, or JSON.

        Args:
            is_open: whether an answer begins within a thought; None: it has no thoughts.
            guides: kinds of answers that a grammar allows, "calls" and "json"; empty: there is no grammar.
        """
        calls = self._calls
        if guides and not _can_guide(calls, beside_json="json" in guides):
            calls = format_of("calls", "", JSON)
        thoughts = self._thoughts if splits and is_open is not None else None
        return AnswerReading(thoughts, calls, use.callable, use.most, splits and bool(is_open))

    def ids_of(self, marks: Iterable[str]) -> tuple[int, ...]:
        """Ids of the markers that are special tokens."""
        return tuple(sorted({self._specials[one] for one in marks if one in self._specials}))


def _can_guide(calls: AnswerFormat | None, *, beside_json: bool) -> bool:
    """Whether a grammar can write calls of a format, and its first character tells them from a JSON object."""
    markup = None if calls is None or calls.calls is None else calls.calls.markup
    if markup is None:
        return False
    return not (beside_json and (markup.before or markup.opens).startswith("{"))
