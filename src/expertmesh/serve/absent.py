"""Paths of OpenAI's, vLLM's and other servers that are not here, with what there is instead."""

_ONE_MODEL = "this server has a language model alone; serve a model of that kind elsewhere"
_STATELESS = "nothing is kept between requests; send the whole conversation again"
_ABSENT = {
    "/v1/embeddings": _ONE_MODEL,
    "/v1/rerank": _ONE_MODEL,
    "/v2/rerank": _ONE_MODEL,
    "/rerank": _ONE_MODEL,
    "/v1/score": _ONE_MODEL,
    "/score": _ONE_MODEL,
    "/pooling": _ONE_MODEL,
    "/classify": _ONE_MODEL,
    "/embed": _ONE_MODEL,
    "/v1/moderations": _ONE_MODEL,
    "/v1/images": _ONE_MODEL,
    "/v1/audio": _ONE_MODEL,
    "/v1/videos": _ONE_MODEL,
    "/v1/realtime": "there is text alone; use /v1/chat/completions with stream",
    "/v1/batches": "batches are not kept; `expertmesh generate --input` answers files, and requests may run side by "
    "side",
    "/v1/files": "files are not kept; send texts in requests",
    "/v1/uploads": "files are not kept; send texts in requests",
    "/v1/vector_stores": "files are not kept; send texts in requests",
    "/v1/messages/batches": "batches are not kept; send messages side by side",
    "/v1/fine_tuning": "models are trained by `expertmesh finetune`",
    "/v1/responses": _STATELESS,
    "/v1/responses/compact": "conversations are not shortened; send less",
    "/v1/conversations": _STATELESS,
    "/v1/assistants": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/chat/completions": _STATELESS,
    "/v1/evals": "models are evaluated by `expertmesh evaluate`",
    "/v1/completions/render": "/tokenize has the tokens of a prompt",
    "/v1/chat/completions/render": "/tokenize has the tokens of a conversation",
    "/generate": "use /v1/completions",
    "/completion": "use /v1/completions",
    "/api/generate": "use /v1/completions",
    "/api/chat": "use /v1/chat/completions",
    "/api/tags": "use /v1/models",
    "/chat/completions": "begin with /v1 (base_url http://HOST:PORT/v1)",
    "/completions": "begin with /v1 (base_url http://HOST:PORT/v1)",
    "/models": "begin with /v1 (base_url http://HOST:PORT/v1)",
    "/docs": "use /openapi.json",
    "/redoc": "use /openapi.json",
    "/load": "use /metrics (num_requests_running, num_requests_waiting)",
    "/server_info": "use /version, /v1/models and /metrics",
    "/sleep": "end the server (SIGTERM), and start it again",
    "/wake_up": "end the server (SIGTERM), and start it again",
}
"""Paths, which have paths below them, too, by the beginning; the longest one counts."""


def why_not(path: str) -> str:
    """Why there is no such path, and what to use."""
    fits = [one for one in _ABSENT if path == one or path.startswith(f"{one}/")]
    if not fits:
        return "there is no such path; /openapi.json lists those that there are"
    name = max(fits, key=len)
    return f"{name}: is not here: {_ABSENT[name]}"
