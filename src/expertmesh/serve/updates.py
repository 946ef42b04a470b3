"""News of answers: what each output of the engine adds to an answer, as pieces, tokens and scores."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from expertmesh.engine.output import Logprob, RequestOutput
from expertmesh.serve.reading import Job
from expertmesh.text.answer_pieces import (
    AnswerParser,
    CallStart,
    Content,
    Piece,
    Thought,
    joined,
)


@dataclass(frozen=True)
class Update:
    """New part of an answer."""

    pieces: Sequence[Piece]  # new content, thoughts and calls, in order; a prompt that is echoed is content
    ids: Sequence[int] = ()  # new tokens, including the prompt's if it is echoed
    entries: Sequence[Logprob | None] = ()  # logprobs of the new tokens; None for the first token of a prompt
    experts: tuple[Any, int] | None = None  # new rows of routed experts, and the index of the first one
    # finish reason if the answer has ended, else None; "tool_calls" for an answer with calls that ended by itself
    finish_reason: str | None = None


@dataclass
class _Given:
    """Part of an answer that was given."""

    parser: AnswerParser
    num_characters: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    has_begun: bool = False
    has_calls: bool = False


@dataclass
class Updates:
    """Updates of the answers to one request."""

    job: Job
    _seen: dict[int, _Given] = field(default_factory=dict)
    _last: dict[int, RequestOutput] = field(default_factory=dict)

    def of(self, index: int, output: RequestOutput) -> Update:
        """Part of an answer that an output adds."""
        self._last[index] = output
        seen = self._seen.setdefault(index, _Given(self.job.make_parser()))
        new_ids = self._new_ids(output)
        text = "" if self.job.drops_token else output.text[seen.num_characters :]
        ids, entries = new_ids[seen.num_tokens :], (output.logprobs or ())[seen.num_tokens :]
        if self.job.drops_token:
            entries = ()
        seen.num_characters += len(text)
        seen.num_tokens += len(ids)
        found: list[Logprob | None] = list(entries)
        pieces = seen.parser.feed(text)
        if not seen.has_begun and self.job.shown:
            pieces = [Content(self.job.shown[index // self.job.params[0].n]), *pieces]
            ids = (*output.prompt_ids, *ids)
            found = [*(output.prompt_logprobs or ()), *found]
        seen.has_begun = True
        experts = None
        if output.routed_experts is not None and len(output.routed_experts) > seen.num_rows:
            experts = output.routed_experts[seen.num_rows :], seen.num_rows
            seen.num_rows = len(output.routed_experts)
        reason: str | None = output.finish_reason
        if reason is not None:
            pieces = [*pieces, *seen.parser.finish()]
        if not self.job.has_thoughts:
            pieces = [piece for piece in pieces if not isinstance(piece, Thought)]
        seen.has_calls |= any(isinstance(piece, CallStart) for piece in pieces)
        if self.job.drops_token and reason is not None:
            reason = "length"
        if reason == "stop" and seen.has_calls:
            reason = "tool_calls"
        return Update(joined(pieces), ids, found, experts, reason)

    def usage(self) -> dict[str, Any]:
        """Token counts so far, as OpenAI names them."""
        num_prompt = sum(map(len, self.job.prompts))
        num_new = sum(len(self._new_ids(output)) for output in self._last.values())
        n = self.job.params[0].n
        cached = sum(self._last[i].num_cached_tokens for i in self._last if i % n == 0)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _new_ids(self, output: RequestOutput) -> tuple[int, ...]:
        return () if self.job.drops_token else output.token_ids
