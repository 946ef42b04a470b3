"""Conversion of engine outputs to OpenAI's response format: whole answers, and chunks of a stream."""

import base64
import io
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from expertmesh.engine.output import Logprob, RequestOutput
from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import Job
from expertmesh.serve.updates import Update, Updates
from expertmesh.text.answer_pieces import CallArguments, CallStart, Content, Piece, Thought
from expertmesh.text.stream import TextStream

_LEAST = -9999.0
"""Value that replaces a logprob of minus infinity, which JSON does not have."""


_LOST = "\ufffd"
"""Character in the place of bytes that are none."""


def as_id(token_id: int) -> str:
    """Name of a token that has no text of its own."""
    return f"token_id:{token_id}"


class TokenTexts:
    """Texts and bytes of single tokens. `as_ids`: whether texts are written as `token_id:7`."""

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
    """Part of an answer that the client has received: whether its head, and where the texts of its tokens end."""

    has_begun: bool = False
    stream: TextStream | None = None
    offset: int = 0


@dataclass
class Writer:
    """Formats the answers to one request."""

    job: Job
    model: str
    texts: TokenTexts
    wants_logprobs: bool
    wants_ids: bool
    is_chat: bool
    has_usage: bool = False
    has_all_usage: bool = False
    _sent: dict[int, _Sent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set the id and the time of creation."""
        self._updates = Updates(self.job)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Response with complete answers."""
        choices = [self._choice(i, self._updates.of(i, outputs[i]), "message") for i in sorted(outputs)]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._head(kind) | {"choices": choices, "usage": self._updates.usage()}

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Stream events for an update of an answer, one for each of its pieces; empty if nothing is new."""
        sent = self._sent.setdefault(index, _Sent())
        found = []
        if self.is_chat and not sent.has_begun:
            delta = {"role": "assistant", "content": ""}
            found.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        sent.has_begun = True
        update = self._updates.of(index, output)
        parts = [Update([piece]) for piece in update.pieces[:-1]]
        rest = replace(update, pieces=update.pieces[-1:])
        scored = rest.ids and (self.wants_logprobs or self.wants_ids)
        if rest.pieces or rest.experts or scored or rest.finish_reason is not None:
            parts.append(rest)
        found += [self._choice(index, part, "delta") for part in parts]
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        usage = {"usage": self._updates.usage() if self.has_all_usage else None}
        usage = usage if self.has_usage else {}
        return [self._head(kind) | {"choices": [choice]} | usage for choice in found]

    def last(self) -> list[dict[str, Any]]:
        """Final event of a stream with its usage, if requested."""
        if not self.has_usage:
            return []
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return [self._head(kind) | {"choices": [], "usage": self._updates.usage()}]

    @property
    def is_named(self) -> bool:
        """Whether events have names: OpenAI's of completions have none."""
        return False

    def failed(self, fault: RequestError) -> list[dict[str, Any]]:
        """Event of an error in a stream."""
        return [fault.body]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, update: Update, part: str) -> dict[str, Any]:
        """Choice object of a response or an event."""
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            choice[part] = (_message if part == "message" else _delta)(update.pieces)
            choice["logprobs"] = self._chat_logprobs(update) if self.wants_logprobs else None
        else:
            choice["text"] = text_of(update.pieces, Content)
            choice["logprobs"] = self._logprobs(index, update) if self.wants_logprobs else None
        choice["finish_reason"] = update.finish_reason
        if self.wants_ids:
            choice["token_ids"] = list(update.ids)
        if update.experts is not None:
            rows, start = update.experts
            choice["routed_experts"] = npy(rows.numpy())
            if part == "delta":
                choice["routed_experts_start"] = start
        return choice

    def _logprobs(self, index: int, update: Update) -> dict[str, Any]:
        """Logprobs of a completion."""
        sent = self._sent.setdefault(index, _Sent())
        if sent.stream is None:
            sent.stream = TextStream(self.texts.tokenizer)
        offsets = []
        for token in update.ids:
            offsets.append(sent.offset + sent.stream.breaks(token))
            sent.offset += len(sent.stream.feed(token))
        return {
            "tokens": [self.texts.text(token) for token in update.ids],
            "token_logprobs": [None if e is None else _finite(e.logprob) for e in update.entries],
            "top_logprobs": [None if e is None else self._by_text(e) for e in update.entries],
            "text_offset": offsets,
        }

    def _by_text(self, entry: Logprob) -> dict[str, float]:
        """Logprobs of the most likely tokens and the chosen one, by text; other tokens without a text of their own: by
        id."""
        texts = {token: self.texts.text(token) for token, _ in entry.top}
        texts |= {entry.token_id: self.texts.text(entry.token_id)}
        count = Counter(texts.values())
        found = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            is_own = token == entry.token_id or (count[texts[token]] == 1 and _LOST not in texts[token])
            found[texts[token] if is_own else as_id(token)] = _finite(value)
        return found

    def _chat_logprobs(self, update: Update) -> dict[str, Any]:
        """Logprobs of a chat completion."""
        content = []
        for entry in update.entries:
            assert entry is not None
            top = [self._one(token, value) for token, value in entry.top]
            content.append(self._one(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        data = list(self.texts.bytes(token))
        return {"token": self.texts.text(token), "logprob": _finite(value), "bytes": data}


def text_of(parts: Iterable[Piece], kind: type[Content] | type[Thought]) -> str:
    """Text of all parts of one kind."""
    return "".join(piece.text for piece in parts if isinstance(piece, kind))


def _delta(parts: Sequence[Piece]) -> dict[str, Any]:
    """Delta of a chat's event with one piece or none."""
    (piece,) = parts or (Content(""),)
    if isinstance(piece, Thought):
        return _reasoning(piece.text)
    if isinstance(piece, Content):
        return {"content": piece.text} if piece.text else {}
    if isinstance(piece, CallStart):
        return {"tool_calls": [{"index": piece.index, **_call(piece)}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _message(parts: Sequence[Piece]) -> dict[str, Any]:
    """Message of a whole chat completion."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in parts:
        if isinstance(piece, CallStart):
            calls[piece.index] = _call(piece)
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    content = text_of(parts, Content)
    thought = text_of(parts, Thought)
    return {
        "role": "assistant",
        "content": None if calls and not content else content,
        **(_reasoning(thought) if thought else {}),
        **({"tool_calls": [*calls.values()]} if calls else {}),
    }


def _reasoning(text: str) -> dict[str, Any]:
    """A thought by both names that clients read: DeepSeek's, and OpenRouter's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(start: CallStart) -> dict[str, Any]:
    return {
        "id": start.call_id,
        "type": "function",
        "function": {"name": start.name, "arguments": ""},
    }


def npy(ids_TLK: np.ndarray) -> str:
    """(tokens, layers, K) expert ids as a base64-encoded NumPy file."""
    file = io.BytesIO()
    np.save(file, ids_TLK.astype("<i2"), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST
