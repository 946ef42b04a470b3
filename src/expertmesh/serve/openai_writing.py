"""Answers and streams of OpenAI's /v1/responses."""

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from expertmesh.engine.output import RequestOutput
from expertmesh.serve.blocks import AnswerBlock, BlockChange, BlockWriter
from expertmesh.serve.faults import RequestError
from expertmesh.serve.openai_responses import ResponsesRequest
from expertmesh.text.answer_pieces import Thought

_PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}


@dataclass
class ResponsesWriter(BlockWriter):
    """Formats the answer to one request."""

    request: ResponsesRequest
    _items: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _num_thought: int = 0
    _status: str = "in_progress"

    def __post_init__(self) -> None:
        """Set the id and the time of creation."""
        super().__post_init__()
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())

    def whole(self, outputs: Mapping[int, RequestOutput]) -> dict[str, Any]:
        """Response with the complete answer."""
        for _ in self._news(outputs[0]):
            pass
        return self._response()

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Stream events for an update of the answer; the first ones say that it has begun."""
        assert index == 0
        found = []
        if not self._number:
            for name in ("created", "in_progress"):
                found.append(self._event(f"response.{name}", response=self._response()))
        found += [self._event(name, **fields) for name, fields in self._news(output)]
        if self._status != "in_progress":
            found.append(self._event(f"response.{self._status}", response=self._response()))
        return found

    def last(self) -> list[dict[str, Any]]:
        """No events: the answer's last one ends the stream."""
        return []

    def failed(self, fault: RequestError) -> list[dict[str, Any]]:
        """Event that ends a stream with an error."""
        self._status = "failed"
        body = fault.body["error"]
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        response = self._response() | {"error": {"code": code, "message": body["message"]}}
        return [self._event("response.failed", response=response)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _news(self, output: RequestOutput) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and fields of events for what an output adds."""
        update = self._updates.of(0, output)
        if update.pieces and isinstance(update.pieces[-1], Thought):
            self._num_thought += len(update.ids)
        is_cut = update.finish_reason == "length"
        for step in self._blocks.feed(update.pieces):
            yield from self._of_step(step, is_cut=False)
        if update.finish_reason is not None:
            for step in self._blocks.finish():
                yield from self._of_step(step, is_cut=is_cut)
            self._status = "incomplete" if is_cut else "completed"

    def _of_step(self, step: BlockChange, *, is_cut: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events of a block; the item is kept as it is in the response."""
        block = step.block
        if step.what == "begin":
            self._items.append(_item(block, f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}"))
        item = self._items[block.index]
        item_place = {"output_index": block.index, "item_id": item["id"]}
        place = item_place if block.kind == "call" else item_place | {"content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        name = {
            "thought": "response.reasoning_text",
            "text": "response.output_text",
            "call": "response.function_call_arguments",
        }[block.kind]
        if step.what == "begin":
            yield "response.output_item.added", {"output_index": block.index, "item": {**item}}
            if block.kind != "call":
                yield "response.content_part.added", {**place, "part": _part(block)}
        elif step.what == "grow":
            yield f"{name}.delta", {**place, **more, "delta": step.new}
        else:
            item["status"] = "incomplete" if is_cut else "completed"
            if block.kind == "call":
                item["arguments"] = block.text
                yield f"{name}.done", {**place, "name": block.name, "arguments": block.text}
            else:
                item["content"] = [_part(block)]
                yield f"{name}.done", {**place, **more, "text": block.text}
                yield "response.content_part.done", {**place, "part": _part(block)}
            yield "response.output_item.done", {"output_index": block.index, "item": {**item}}

    def _response(self) -> dict[str, Any]:
        """The response so far."""
        asked, is_over = self.request, self._status in ("completed", "incomplete")
        text, reasoning = asked.text, asked.reasoning
        form = None if text is None else text.format
        params = self.job.params[0]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": ({"reason": "max_output_tokens"} if self._status == "incomplete" else None),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": [{**item} for item in self._items],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": _choice(asked),
            "tools": [_tool(tool.model_dump()) for tool in asked.tools or ()],
            "top_logprobs": 0,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": asked.user,
        }

    def _usage(self) -> dict[str, Any]:
        known = self._updates.usage()
        cached = known["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": known["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": known["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": known["total_tokens"],
        }


def _item(block: AnswerBlock, name: str) -> dict[str, Any]:
    """An item of the response that begins."""
    if block.kind == "call":
        return {
            "id": name,
            "type": "function_call",
            "status": "in_progress",
            "call_id": block.call_id,
            "name": block.name,
            "arguments": "",
        }
    if block.kind == "thought":
        return {
            "id": name,
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
            "encrypted_content": None,
        }
    return {
        "id": name,
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _part(block: AnswerBlock) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "parameters": given["parameters"] or {}, "strict": bool(given["strict"])}


def _choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump()
