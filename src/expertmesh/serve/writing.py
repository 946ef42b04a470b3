"""Conversion of engine outputs to OpenAI's response format: whole answers, and chunks of a stream."""

import base64
import io
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from expertmesh.engine.output import Logprob, RequestOutput
from expertmesh.serve.reading import Job
from expertmesh.text.stream import TextStream

_LEAST = -9999.0
"""Value that replaces a logprob of minus infinity, which JSON does not have."""


_LOST = "\ufffd"
"""Character in the place of bytes that are none."""


def as_id(token_id: int) -> str:
    """Name of a token that has no text of its own."""
    return f"token_id:{token_id}"


class TokenTexts:
    """Texts and bytes of single tokens.

    Args:
        tokenizer: tokenizer of the model.
        as_ids: whether texts are written as `token_id:7`.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids
        self._stream = TextStream(tokenizer)

    def text(self, token_id: int) -> str:
        """Text of a token; incomplete characters become U+FFFD."""
        if self._as_ids:
            return as_id(token_id)
        return self.bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return self._stream.bytes_of(token_id)


@dataclass
class _Sent:
    """Part of an answer that the client has received."""

    num_characters: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    has_begun: bool = False
    stream: TextStream | None = None
    offset: int = 0


@dataclass(frozen=True)
class _Piece:
    """New part of an answer.

    Attributes:
        text: new text.
        ids: new tokens, including the prompt's if it is echoed.
        entries: logprobs of the new tokens; None for the first token of a prompt.
        experts: new rows of routed experts, and the index of the first one.
        finish_reason: finish reason if the answer has ended, else None.
    """

    text: str
    ids: Sequence[int]
    entries: Sequence[Logprob | None]
    experts: tuple[Any, int] | None
    finish_reason: str | None


@dataclass
class Writer:
    """Formats the answers to one request.

    Args:
        job: the parsed request.
        model: name of the model.
        texts: texts of tokens.
        wants_logprobs: whether logprobs are returned.
        wants_ids: whether token ids are returned.
        is_chat: whether it is a chat completion.
        has_usage: whether a stream ends with its usage.
    """

    job: Job
    model: str
    texts: TokenTexts
    wants_logprobs: bool
    wants_ids: bool
    is_chat: bool
    has_usage: bool = False
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _last: dict[int, RequestOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set the id and the time of creation."""
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Response with complete answers."""
        self._last.update(outputs)
        choices = [self._choice(i, self._piece(i, outputs[i]), "message") for i in sorted(outputs)]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self.usage()}

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Stream events for an update of an answer; empty if nothing is new."""
        self._last[index] = output
        sent = self._sent.setdefault(index, _Sent())
        found = []
        if self.is_chat and not sent.has_begun:
            delta = {"role": "assistant", "content": ""}
            found.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        piece = self._piece(index, output)
        is_new = (
            piece.text or piece.experts or (piece.ids and (self.wants_logprobs or self.wants_ids))
        )
        if is_new or piece.finish_reason is not None:
            found.append(self._choice(index, piece, "delta"))
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        usage = {"usage": None} if self.has_usage else {}
        return [self._head(kind) | {"choices": [choice]} | usage for choice in found]

    def last(self) -> list[dict[str, Any]]:
        """Final event of a stream with its usage, if requested."""
        if not self.has_usage:
            return []
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return [self._head(kind) | {"choices": [], "usage": self.usage()}]

    def usage(self) -> dict[str, Any]:
        """Token counts."""
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

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _new_ids(self, output: RequestOutput) -> tuple[int, ...]:
        return () if self.job.drops_token else output.token_ids

    def _piece(self, index: int, output: RequestOutput) -> _Piece:
        """Part of an answer since the last call."""
        sent = self._sent.setdefault(index, _Sent())
        new_ids = self._new_ids(output)
        text = "" if self.job.drops_token else output.text[sent.num_characters :]
        ids, entries = new_ids[sent.num_tokens :], (output.logprobs or ())[sent.num_tokens :]
        if self.job.drops_token:
            entries = ()
        sent.num_characters += len(text)
        sent.num_tokens += len(ids)
        found: list[Logprob | None] = list(entries)
        if not sent.has_begun and self.job.shown:
            text = self.job.shown[index // self.job.params[0].n] + text
            ids = (*output.prompt_ids, *ids)
            found = [*(output.prompt_logprobs or ()), *found]
        sent.has_begun = True
        experts = None
        if output.routed_experts is not None and len(output.routed_experts) > sent.num_rows:
            experts = output.routed_experts[sent.num_rows :], sent.num_rows
            sent.num_rows = len(output.routed_experts)
        reason = output.finish_reason
        if self.job.drops_token and reason is not None:
            reason = "length"
        return _Piece(text, ids, found, experts, reason)

    def _choice(self, index: int, piece: _Piece, part: str) -> dict[str, Any]:
        """Choice object of a response or an event."""
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            said = {"content": piece.text} if piece.text or part == "message" else {}
            choice[part] = {"role": "assistant", **said} if part == "message" else said
            choice["logprobs"] = self._chat_logprobs(piece) if self.wants_logprobs else None
        else:
            choice["text"] = piece.text
            choice["logprobs"] = self._logprobs(index, piece) if self.wants_logprobs else None
        choice["finish_reason"] = piece.finish_reason
        if self.wants_ids:
            choice["token_ids"] = list(piece.ids)
        if piece.experts is not None:
            rows, start = piece.experts
            choice["routed_experts"] = npy(rows.numpy())
            if part == "delta":
                choice["routed_experts_start"] = start
        return choice

    def _logprobs(self, index: int, piece: _Piece) -> dict[str, Any]:
        """Logprobs of a completion."""
        sent = self._sent[index]
        if sent.stream is None:
            sent.stream = TextStream(self.texts.tokenizer)
        offsets = []
        for token in piece.ids:
            offsets.append(sent.offset + sent.stream.breaks(token))
            sent.offset += len(sent.stream.feed(token))
        return {
            "tokens": [self.texts.text(token) for token in piece.ids],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in piece.entries],
            "top_logprobs": [None if e is None else self._by_text(e) for e in piece.entries],
            "text_offset": offsets,
        }

    def _by_text(self, entry: Logprob) -> dict[str, float]:
        """Logprobs of the most likely tokens and the chosen one, by text; other tokens without a text of their own: by id."""
        texts = {token: self.texts.text(token) for token, _ in entry.top}
        texts |= {entry.token_id: self.texts.text(entry.token_id)}
        count = Counter(texts.values())
        found = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            is_own = token == entry.token_id or (
                count[texts[token]] == 1 and _LOST not in texts[token]
            )
            found[texts[token] if is_own else as_id(token)] = _finite(value)
        return found

    def _chat_logprobs(self, piece: _Piece) -> dict[str, Any]:
        """Logprobs of a chat completion."""
        content = []
        for entry in piece.entries:
            assert entry is not None
            top = [self._one(token, value) for token, value in entry.top]
            content.append(self._one(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        data = list(self.texts.bytes(token))
        return {"token": self.texts.text(token), "logprob": _finite(value), "bytes": data}


def npy(ids_TLK: np.ndarray) -> str:
    """(tokens, layers, K) expert ids as a base64-encoded NumPy file."""
    file = io.BytesIO()
    np.save(file, ids_TLK.astype("<i2"), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST
