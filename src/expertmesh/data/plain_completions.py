"""Prompts and completions as plain texts (`data.completions=text`): no chat template, and the completion is learned."""

from pathlib import Path

from tokenizers import Tokenizer

from expertmesh.data.pairs import SIDES
from expertmesh.data.records import Row
from expertmesh.errors import ConfigError
from expertmesh.text.chat import Conversation, TokenSpan
from expertmesh.text.format import hub_files, options_of_files
from expertmesh.text.tokenizer import end_of_text_id, own_start

_NEEDED = (("prompt", "completion"), ("prompt", *SIDES), SIDES)
"""Fields of records of plain texts."""


class PlainForm:
    """Form of rows: start tokens, prompt, completion, end of text; both texts are tokenised apart, as in inference."""

    identity = "plain completions, version 1"

    def __init__(self, tokenizer: Tokenizer, path: Path | None) -> None:
        self._tokenizer, self._end = tokenizer, end_of_text_id(tokenizer)
        own = own_start(tokenizer)
        is_of_hub = path is not None and (
            bool(hub_files(path.parent)) or "start_ids" in options_of_files(path, tokenizer)
        )
        self._start = list(own if is_of_hub else own or (self._end,))

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return (self._end,)

    def writes(self, field: str) -> bool:
        """Whether a field of messages is written: none is."""
        return False

    def problem(self, conversation: Conversation) -> str | None:
        """Reason to leave a record out: there is none."""
        return None

    def prompt(self, text: str) -> list[int]:
        """Start tokens and tokens of a prompt."""
        return self._start + self._ids(text)

    def samples(self, conversation: Conversation) -> list[list[TokenSpan]]:
        """Token spans of a record, of which the completion and its end are learned."""
        prompt, completion = (message["content"] for message in conversation["messages"])
        ids = [*self._ids(completion), self._end]
        return [[TokenSpan(self.prompt(prompt), False), TokenSpan(ids, True)]]

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found


def check_plain(read: object, where: str) -> None:
    """Check that a document is a record of texts: `prompt` and `completion`, or a pair of answers."""
    why = "has no 'prompt' and 'completion'"
    needed = read.shape.needed if isinstance(read, Row) and read.shape is not None else ()
    if isinstance(read, Row) and needed in _NEEDED:
        values = read.values()
        has_texts = all(isinstance(values.get(name), str) for name in needed)
        if has_texts and not (values.get("system") or values.get("tools")):
            return
        why = f"has a list of messages as {' or '.join(map(repr, needed))}"
        if has_texts:
            why = "has 'system' or 'tools', which a plain text has no place for"
    fix = "leave it out, or write all as texts"
    raise ConfigError("data.completions", "text", f"{where} {why}", fix)
