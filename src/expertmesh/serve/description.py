"""OpenAPI description: responses of each path, and bounds that depend on the model."""

from typing import Any

from fastapi import FastAPI

from expertmesh.config.server import ServerConfig
from expertmesh.serve.faults import TYPES
from expertmesh.serve.gate import OPEN_PATHS

_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
    }


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _or_null(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "null"}]}


_ERROR = _object(
    {
        "error": _object(
            {
                "message": {"type": "string", "maxLength": 500},
                "type": _TEXT,
                "param": _or_null(_TEXT),
                "code": _or_null(_TEXT),
            }
        )
    }
)
_ANTHROPIC_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object({"type": _TEXT, "message": {"type": "string", "maxLength": 500}}),
    }
)
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_CARD = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "max_model_len": _COUNT,
    },
    {"parent": _TEXT},
)
_EXTRAS = {"token_ids": _list(_COUNT), "routed_experts": _TEXT}
_ENDS = {"enum": ["stop", "length"]}
_CHAT_ENDS = {"enum": ["stop", "length", "tool_calls"]}
_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}),
    }
)
_SCORES = {"type": "object", "additionalProperties": _NUMBER}
_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_or_null(_NUMBER)),
        "top_logprobs": _list(_or_null(_SCORES)),
        "text_offset": _list(_COUNT),
    }
)
_SCORED = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object(_SCORED | {"top_logprobs": _list(_object(_SCORED))})),
        "refusal": {"type": "null"},
    }
)


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
        }
    )


_COMPLETION = _answer(
    "text_completion",
    _object(
        {"index": _COUNT, "text": _TEXT, "logprobs": _or_null(_LOGPROBS), "finish_reason": _ENDS},
        _EXTRAS,
    ),
)
_CHAT = _answer(
    "chat.completion",
    _object(
        {
            "index": _COUNT,
            "message": _object(
                {"role": {"const": "assistant"}, "content": _or_null(_TEXT)},
                {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _list(_CALL)},
            ),
            "logprobs": _or_null(_CHAT_LOGPROBS),
            "finish_reason": _CHAT_ENDS,
        },
        _EXTRAS,
    ),
)
_RESPONSE = _object(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "model": _TEXT,
        "output": _list(_object({"id": _TEXT, "type": _TEXT, "status": _TEXT})),
        "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
    }
)
_MESSAGE = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": _list(_object({"type": _TEXT})),
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _or_null(_TEXT),
        "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
    }
)
_EVENTS = {"text/event-stream": {"schema": _object({"data": _TEXT})}}
_RETRY = {"retry-after": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}
_SAYS = {
    400: "a field is wrong, or cannot be obeyed",
    401: "the key is missing or wrong",
    403: "the host is not this machine",
    404: "there is no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is no JSON",
    429: "too many requests wait",
    500: "the answer could not be computed",
    503: "the server is ending, or its engine failed",
}


def _responses(
    schema: dict[str, Any] | None,
    *faults: int,
    says: str,
    content: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of a path."""
    kinds = {} if schema is None else {"application/json": {"schema": schema}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": says, "content": kinds | (content or {})}}
    for status in (401, 403, *faults):
        assert status in TYPES
        found[status] = {
            "description": _SAYS[status],
            "content": {"application/json": {"schema": error or _ERROR}},
        }
        if status == 429:
            found[status]["headers"] = _RETRY
    return found


_OF_BODIES = (400, 404, 408, 413, 415, 500, 503)
ANSWERS = {
    "adapter": _responses(None, *_OF_BODIES, says="what has happened", content={"text/plain": {"schema": _TEXT}}),
    "reset": _responses(None, 408, 413, 500, 503, says="nothing is cached", content={}),
    "health": _responses(_object({"status": _TEXT}), 503, says="requests are answered"),
    "version": _responses(_object({"version": _TEXT}), says="version of the program"),
    "metrics": _responses(None, says="numbers for Prometheus", content={"text/plain": {"schema": _TEXT}}),
    "models": _responses(_object({"object": {"const": "list"}, "data": _list(_CARD)}), says="all models"),
    "model": _responses(_CARD, 404, says="the model"),
    "tokenizer_info": _responses(
        _object({"tokenizer_class": _TEXT, "eos_token": _TEXT, "model_max_length": _COUNT}),
        says="the tokenizer",
    ),
    "tokenize": _responses(
        _object({"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _COUNT}),
        *_OF_BODIES,
        says="the tokens",
    ),
    "detokenize": _responses(_object({"prompt": _TEXT}), *_OF_BODIES, says="the text"),
    "responses": _responses(_RESPONSE, *_OF_BODIES, 429, says="the answer", content=_EVENTS),
    "input_tokens": _responses(
        _object({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}),
        *_OF_BODIES,
        says="the number",
    ),
    "messages": _responses(_MESSAGE, *_OF_BODIES, 429, says="the answer", content=_EVENTS, error=_ANTHROPIC_ERROR),
    "count_tokens": _responses(
        _object({"input_tokens": _COUNT}), *_OF_BODIES, says="the number", error=_ANTHROPIC_ERROR
    ),
    "completions": _responses(_COMPLETION, *_OF_BODIES, 429, says="the answers", content=_EVENTS),
    "chat": _responses(_CHAT, *_OF_BODIES, 429, says="the answers", content=_EVENTS),
}
"""OpenAPI responses by path."""


def describe(app: FastAPI, *, vocab_size: int, config: ServerConfig) -> None:
    """Add model-dependent bounds to the OpenAPI description: token ids, number of answers, keys."""
    made: dict[str, Any] = {}
    original = app.openapi

    def description() -> dict[str, Any]:
        if not made:
            made.update(original())
            _bound(made, vocab_size, config)
        return made

    whole: Any = app
    whole.openapi = description


def _bound(made: dict[str, Any], vocab_size: int, config: ServerConfig) -> None:
    schemas = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in ("CompletionRequest", "ChatRequest", "DetokenizeRequest"):
        _limit_ids(schemas[name]["properties"], vocab_size - 1)
    for name in ("CompletionRequest", "ChatRequest"):
        fields = schemas[name]["properties"]
        fields["n"]["anyOf"][0]["maximum"] = config.max_n
        biases = fields["logit_bias"]["anyOf"][0]
        biases["propertyNames"] = {"pattern": f"^({below(vocab_size)})$"}
        score = "logprobs" if name == "CompletionRequest" else "top_logprobs"
        fields[score]["anyOf"][0]["maximum"] = config.max_logprobs
    for path in made["paths"].values():
        for one in path.values():
            one["responses"].pop("422", None)
    if config.is_guarded:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for place, path in made["paths"].items():
            for one in path.values():
                one["security"] = [] if place in OPEN_PATHS else [{"key": []}]


def _limit_ids(node: Any, largest: int) -> None:
    """Bound all lists of token ids in a schema."""
    if isinstance(node, dict):
        items = node.get("items")
        if isinstance(items, dict) and items.get("type") == "integer":
            items["maximum"] = largest
        for value in node.values():
            _limit_ids(value, largest)
    elif isinstance(node, list):
        for value in node:
            _limit_ids(value, largest)


def below(size: int) -> str:
    """Regular expression for the integers from 0 to size - 1 without leading zeros."""
    last = str(size - 1)
    found = []
    if len(last) > 1:
        found.append("[0-9]")
        found += [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(last))]
    for place, digit in enumerate(last):  # as many digits as the last one, and a smaller digit at this place
        low = 1 if place == 0 and len(last) > 1 else 0
        if int(digit) > low:
            rest = len(last) - place - 1
            found.append(f"{last[:place]}[{low}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join([*found, last])
