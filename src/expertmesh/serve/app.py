"""HTTP API of the server: routes and handlers."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from expertmesh.config.server import ServerConfig
from expertmesh.engine.engine import Engine
from expertmesh.errors import ConfigError
from expertmesh.serve.absent import why_not
from expertmesh.serve.answer import Answer, AnswerWriter
from expertmesh.serve.anthropic_messages import CountTokensRequest, MessagesRequest
from expertmesh.serve.anthropic_messages import translated as translated_messages
from expertmesh.serve.anthropic_writing import MessagesWriter
from expertmesh.serve.description import ANSWERS, describe
from expertmesh.serve.experts_page import PAGE, PAGE_HEADERS
from expertmesh.serve.faults import RequestError
from expertmesh.serve.gate import Gate
from expertmesh.serve.json_route import JsonRoute
from expertmesh.serve.metrics import Metrics
from expertmesh.serve.openai_responses import ResponsesRequest
from expertmesh.serve.openai_responses import translated as translated_response
from expertmesh.serve.openai_writing import ResponsesWriter
from expertmesh.serve.reading import Job, RequestReader, as_prompts
from expertmesh.serve.request_ids import RequestIds
from expertmesh.serve.runtime_adapters import RuntimeAdapters
from expertmesh.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    Sampling,
    TokenizeChat,
    TokenizeText,
    UnloadAdapterRequest,
)
from expertmesh.serve.translation import TranslatedRequest
from expertmesh.serve.worker import EngineFailedError, EngineWorker, Ticket
from expertmesh.serve.writing import TokenTexts, Writer
from expertmesh.serve.wrong_body import best_error

_READERS = 2
"""Number of threads that tokenize requests."""
_SCHEMA_READERS = 4
"""Number of threads that compile schemas and grammars, which others do not wait for."""
_MOST_SCHEMAS = 32
"""Maximum requests whose schemas and grammars wait to be compiled."""
_MOST_ERRORS = 100
"""Maximum errors of a body that are looked at: the first one's forms are listed at its place."""


class ServerApp:
    """Application over one engine."""

    def __init__(
        self,
        engine: Engine,  # the engine, which only the application uses from now on
        config: ServerConfig,  # options of the server
        *,
        model_name: str,  # name of the model for clients
        keys: tuple[str, ...] = (),  # accepted API keys; empty: no key is needed
        version: str,  # version of the program
        num_threads: int | None = None,  # see `EngineWorker`
    ) -> None:
        self.config, self.model_name, self.version = config, model_name, version
        self.engine, self.created = engine, int(time.time())
        self.reader = RequestReader(engine, config, model_name)
        self.metrics = Metrics(engine, model_name)
        # thread of the engine; `start` starts it
        self.worker = EngineWorker(
            engine,
            self.metrics.stepped,
            num_threads=num_threads,
            left=self.metrics.requests.left,
        )
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="reading")
        self._schemas = ThreadPoolExecutor(_SCHEMA_READERS, thread_name_prefix="schemas")
        self._num_schemas = 0
        self._most = engine.config.max_sequences + config.max_waiting
        self.adapters = RuntimeAdapters(self.worker, self.reader, config.adapter_root)
        self.gate = Gate(self._routes(), config, keys)  # the ASGI application
        asgi: Any = self.gate
        if config.allow_origin:
            from starlette.middleware.cors import CORSMiddleware

            asgi = CORSMiddleware(
                self.gate,
                allow_origins=config.allow_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client sends some of its own; origin and key are still checked
                expose_headers=["x-request-id"],
            )
        self.asgi = RequestIds(asgi)

    def start(self) -> None:
        """Start to answer; called in the event loop."""
        self.worker.start(asyncio.get_running_loop())
        self._watching = asyncio.get_running_loop().create_task(self.metrics.watch_loop())

    def stop(self) -> None:
        """Stop the engine's thread."""
        self._watching.cancel()
        self.worker.stop()
        for pool in (self._pool, self._schemas):
            pool.shutdown(wait=False, cancel_futures=True)

    def _routes(self) -> FastAPI:
        app = FastAPI(
            title="ExpertMesh",
            version=self.version,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        app.router.route_class = JsonRoute
        app.add_exception_handler(RequestError, _on_fault)
        app.add_exception_handler(EngineFailedError, _on_dead_engine)
        app.add_exception_handler(RequestValidationError, _on_wrong_body)
        app.add_exception_handler(HTTPException, _on_wrong_path)
        app.add_exception_handler(Exception, _on_failure)
        app.get("/", response_class=HTMLResponse, include_in_schema=False)(self.page)
        app.get("/health", responses=ANSWERS["health"])(self.health)
        for method in (app.get, app.post):
            method("/ping", responses=ANSWERS["health"])(self.health)
        app.post("/reset_prefix_cache", responses=ANSWERS["reset"], response_class=Response)(self.reset_prefix_cache)
        app.get("/version", responses=ANSWERS["version"])(self.show_version)
        app.get("/metrics", responses=ANSWERS["metrics"])(self.show_metrics)
        app.get("/v1/models", responses=ANSWERS["models"])(self.models)
        app.get("/v1/models/{model:path}", responses=ANSWERS["model"])(self.model)
        app.get("/tokenizer_info", responses=ANSWERS["tokenizer_info"])(self.tokenizer_info)
        app.post("/v1/responses", responses=ANSWERS["responses"])(self.responses)
        app.post("/v1/responses/input_tokens", responses=ANSWERS["input_tokens"])(self.input_tokens)
        app.post("/v1/messages", responses=ANSWERS["messages"])(self.messages)
        app.post("/v1/messages/count_tokens", responses=ANSWERS["count_tokens"])(self.count_tokens)
        app.post("/v1/load_lora_adapter", responses=ANSWERS["adapter"], response_class=PlainTextResponse)(
            self.load_adapter
        )
        app.post(
            "/v1/unload_lora_adapter",
            responses=ANSWERS["adapter"],
            response_class=PlainTextResponse,
        )(self.unload_adapter)
        app.post("/tokenize", responses=ANSWERS["tokenize"])(self.tokenize)
        app.post("/detokenize", responses=ANSWERS["detokenize"])(self.detokenize)
        app.post("/v1/completions", responses=ANSWERS["completions"])(self.completions)
        app.post("/v1/chat/completions", responses=ANSWERS["chat"])(self.chat)
        describe(app, vocab_size=self.reader.vocab_size, config=self.config)
        return app

    async def page(self) -> Response:
        """Web page for prompts that shows tokens and their experts."""
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    async def health(self) -> Response:
        """Whether requests are answered."""
        if self.worker.error is not None:
            raise RequestError(503, self.worker.error, code="failed")
        if self.gate.is_draining:
            raise RequestError(503, "the server is ending", code="draining")
        if not self.worker.is_ready:
            raise RequestError(503, "the engine has not begun", code="starting")
        return JSONResponse({"status": "ready"})

    async def show_version(self) -> Response:
        """Version of the program."""
        return JSONResponse({"version": self.version})

    async def show_metrics(self) -> Response:
        """Prometheus metrics."""
        text, kind = self.metrics.text()
        return Response(text, headers={"content-type": kind})

    async def models(self) -> Response:
        """The model that is served, and its adapters."""
        cards = [self._card(name) for name in self.reader.model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, model: str) -> Response:
        """Description of a model or adapter."""
        return JSONResponse(self._card(self.reader.adapter_of(model) or self.model_name))

    async def load_adapter(self, request: LoadAdapterRequest) -> Response:
        """Load an adapter, as in vLLM."""
        return PlainTextResponse(await self.adapters.load(request))

    async def unload_adapter(self, request: UnloadAdapterRequest) -> Response:
        """Unload an adapter when its requests have ended, as in vLLM."""
        return PlainTextResponse(await self.adapters.unload(request))

    async def reset_prefix_cache(self) -> Response:
        """Forget all cached prefixes, as in vLLM; running answers are computed again from their tokens."""
        if self.worker.error is not None:
            raise RequestError(503, self.worker.error, code="failed")
        await self.worker.call(partial(self.engine.update_weights, {}))
        return Response()

    async def tokenizer_info(self) -> Response:
        """Special tokens and the chat template, as lm-evaluation-harness requests them."""
        tokenizer = self.reader.text.tokenizer
        ends = [tokenizer.id_to_token(i) for i in self.reader.text.end_ids]
        start = [tokenizer.id_to_token(i) for i in self.reader.text.start_ids]
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": ends[0],
            "bos_token": start[0] if start else None,
            "pad_token": ends[0],
            "model_max_length": self.reader.max_len,
            "vocab_size": self.reader.vocab_size,
            "chat_template": self.reader.text.chat.source if self.reader.text.can_chat else None,
        }
        return JSONResponse(values)

    async def tokenize(self, request: TokenizeText | TokenizeChat) -> Response:
        """Tokenize a text or a conversation."""
        ids = await self._aside(self.reader.tokenize, request)
        tokenizer = self.reader.text.tokenizer
        names = [tokenizer.id_to_token(i) for i in ids] if request.return_token_strs else None
        body = {"count": len(ids), "max_model_len": self.reader.max_len, "tokens": ids}
        return JSONResponse(body | {"token_strs": names})

    async def detokenize(self, request: DetokenizeRequest) -> Response:
        """Convert tokens to text."""
        return JSONResponse({"prompt": await self._aside(self.reader.detokenize, request)})

    async def completions(self, request: CompletionRequest) -> Response:
        """Continue a text."""
        prompts = as_prompts(request.prompt)
        self._check_size(len(prompts) * (request.n or 1))  # before they are tokenised
        job = await self._with_rules(await self._aside(self.reader.completion, request))
        return self._answer(request, job, wants_logprobs=request.logprobs is not None)

    async def chat(self, request: ChatRequest) -> Response:
        """Answer a conversation."""
        job = await self._with_rules(await self._aside(self.reader.chat, request))
        return self._answer(request, job, wants_logprobs=bool(request.logprobs), is_chat=True)

    async def responses(self, request: ResponsesRequest) -> Response:
        """Answer a conversation, as OpenAI's responses; nothing is kept."""
        job = await self._translated(translated_response(request))
        writer = ResponsesWriter(job, job.adapter or self.model_name, request)
        return self._sent(job, writer, is_stream=bool(request.stream))

    async def messages(self, request: MessagesRequest) -> Response:
        """Answer a conversation, as Anthropic's messages."""
        job = await self._translated(translated_messages(request))
        writer = MessagesWriter(job, job.adapter or self.model_name)
        return self._sent(job, writer, is_stream=bool(request.stream))

    async def count_tokens(self, request: CountTokensRequest) -> Response:
        """Number of tokens of a conversation."""
        return JSONResponse({"input_tokens": await self._size(translated_messages(request))})

    async def input_tokens(self, request: ResponsesRequest) -> Response:
        """Number of tokens of a conversation, as OpenAI's responses count them."""
        size = await self._size(translated_response(request))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": size})

    async def _size(self, asked: TranslatedRequest) -> int:
        """Number of tokens of the prompt of a request that is a chat completion."""
        try:
            job = await self._aside(self.reader.chat, asked.asking(max_tokens=1).chat())
        except RequestError as fault:
            raise asked.own(fault) from None
        return len(job.prompts[0])

    async def _translated(self, asked: TranslatedRequest) -> Job:
        """The job of a request that is a chat completion; errors are in the request's own names."""
        try:
            return await self._with_rules(await self._aside(self.reader.chat, asked.chat()))
        except RequestError as fault:
            raise asked.own(fault) from None

    def _answer(self, request: Sampling, job: Job, *, wants_logprobs: bool, is_chat: bool = False) -> Answer:
        as_ids = bool(request.return_tokens_as_token_ids)
        options = request.stream_options
        writer = Writer(
            job,
            job.adapter or self.model_name,
            TokenTexts(self.reader.text.tokenizer, as_ids=as_ids),
            wants_logprobs=wants_logprobs,
            wants_ids=bool(request.return_token_ids),
            is_chat=is_chat,
            has_usage=options is not None and bool(options.include_usage),
            has_all_usage=options is not None and bool(options.continuous_usage_stats),
        )
        return self._sent(job, writer, is_stream=bool(request.stream))

    def _sent(self, job: Job, writer: AnswerWriter, *, is_stream: bool) -> Answer:
        ticket = Ticket(job.prompts, job.params, job.adapter)
        return Answer(
            self.worker,
            ticket,
            writer,
            is_stream=is_stream,
            without_effect=job.without_effect,
            admit=self._admit,
            watch=self.metrics.requests.watch(ticket),
        )

    def _admit(self, ticket: Ticket) -> None:
        """Raise RequestError if the server has no room for the answers."""
        if self.worker.error is not None:
            raise RequestError(503, self.worker.error, code="failed")
        self._check_size(ticket.num_answers)
        if self.worker.num_answers + ticket.num_answers > self._most:
            self.metrics.rejected("queue_full")
            raise RequestError(
                429,
                "too many requests wait; try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    def _check_size(self, num_answers: int) -> None:
        """Raise RequestError if a request asks for more answers than the server ever has room for."""
        if num_answers > self._most:
            self.metrics.rejected("too_many_answers")
            raise RequestError(
                429,
                f"{num_answers} answers: this server takes {self._most} at once; ask for fewer",
                param="n",
                code="too_many_answers",
                headers={"retry-after": "1", "x-should-retry": "false"},
            )

    async def _with_rules(self, job: Job) -> Job:
        """A job whose guide is compiled, in threads that other requests do not need."""
        if job.guide is None:
            return job
        if self._num_schemas >= _MOST_SCHEMAS:
            self.metrics.rejected("queue_full")
            raise RequestError(
                429,
                "too many new schemas and grammars wait; try again later",
                param=job.guide.field,
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self._num_schemas += 1
        try:
            found: Job = await self._aside(self.reader.with_rules, job, pool=self._schemas)
            return found
        finally:
            self._num_schemas -= 1

    async def _aside(self, call: Callable[..., Any], *args: Any, pool: ThreadPoolExecutor | None = None) -> Any:
        """Result of a call that runs in a thread pool, the readers' by default; ConfigError becomes RequestError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool or self._pool, call, *args)
        except ConfigError as error:
            raise RequestError(400, str(error), param=error.option) from None

    def _card(self, name: str) -> dict[str, Any]:
        parent = {} if name == self.model_name else {"parent": self.model_name}
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "expertmesh",
            "max_model_len": self.reader.max_len,
        } | parent


async def _on_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response(request.url.path)


async def _on_dead_engine(request: Request, error: Exception) -> Response:
    """Response to an order that a dead engine cannot follow."""
    return RequestError(503, str(error), code="failed").response(request.url.path)


async def _on_wrong_body(request: Request, error: Exception) -> Response:
    """Response to an invalid body: the error that fits it best."""
    assert isinstance(error, RequestValidationError)
    name, message = best_error(error.errors()[:_MOST_ERRORS], error.body)
    return RequestError(400, message, param=name).response(request.url.path)


async def _on_wrong_path(request: Request, error: Exception) -> Response:
    """Response to an unknown path or method."""
    assert isinstance(error, HTTPException)
    text = {404: why_not(request.url.path), 405: "this path has no such method"}
    message = text.get(error.status_code, str(error.detail))
    return RequestError(error.status_code, message, headers=dict(error.headers or {})).response(request.url.path)


async def _on_failure(request: Request, error: Exception) -> Response:
    """Response to an unexpected error, which the gate logs."""
    return RequestError(500, "the server failed; its log says why").response(request.url.path)
