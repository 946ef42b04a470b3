"""Answers and streams of Anthropic's /v1/messages."""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from expertmesh.engine.output import RequestOutput
from expertmesh.serve.blocks import AnswerBlock, BlockChange, BlockWriter
from expertmesh.serve.faults import RequestError

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass
class MessagesWriter(BlockWriter):
    """Formats the answer to one request."""

    _reason: str | None = None
    _stop: str | None = None
    _has_begun: bool = False

    def __post_init__(self) -> None:
        """Set the id."""
        super().__post_init__()
        self._id = f"msg_{uuid.uuid4().hex}"

    def whole(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Response with the complete answer."""
        for _ in self._news(outputs[0]):
            pass
        return self._message([_block(block, is_whole=True) for block in self._blocks.all])

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Stream events for an update of the answer."""
        assert index == 0
        news = [*self._news(output)]
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            begun = self._message([]) | {"stop_reason": None, "stop_sequence": None}
            begun["usage"] = begun["usage"] | {"output_tokens": 0}
            found += [{"type": "message_start", "message": begun}, {"type": "ping"}]
        return found + news

    def last(self) -> list[dict[str, Any]]:
        """Events that end a stream."""
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def failed(self, fault: RequestError) -> list[dict[str, Any]]:
        """Event of an error in a stream."""
        return [fault.body_at("/v1/messages")]

    def _news(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Events for what an output adds."""
        update = self._updates.of(0, output)
        for step in self._blocks.feed(update.pieces):
            yield from _events(step)
        if update.finish_reason is not None:
            for step in self._blocks.finish():
                yield from _events(step)
            self._reason = _REASONS[update.finish_reason]
            if self._reason == "end_turn" and output.stop_string is not None:
                self._reason, self._stop = "stop_sequence", output.stop_string

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Token counts; tokens of the prompt that the cache had are counted apart."""
        known = self._updates.usage()
        cached = known["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": known["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": known["completion_tokens"],
        }


def _events(step: BlockChange) -> Iterator[dict[str, Any]]:
    block = step.block
    if step.what == "begin":
        begun = _block(block, is_whole=False)
        yield {"type": "content_block_start", "index": block.index, "content_block": begun}
        return
    if step.what == "end":
        if block.kind == "thought":
            yield _delta(block, {"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": block.index}
        return
    kind, name = {
        "text": ("text_delta", "text"),
        "thought": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    yield _delta(block, {"type": kind, name: step.new})


def _delta(block: AnswerBlock, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _block(block: AnswerBlock, *, is_whole: bool) -> dict[str, Any]:
    """A block of the answer, or its beginning."""
    text = block.text if is_whole else ""
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    given = _arguments(text)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of a call; those that are cut or no object are empty, as the format has objects alone."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
