"""Conversion of client requests to engine requests: tokens, sampling parameters, and refusal of unsupported fields."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from expertmesh.config.base import FieldError
from expertmesh.config.sampling import SamplingParams
from expertmesh.config.server import ServerConfig
from expertmesh.engine.chat import conversation_ids
from expertmesh.engine.engine import Engine
from expertmesh.engine.grammar import Compiled
from expertmesh.engine.guided_calls import GuidedCalls
from expertmesh.engine.request import for_prompts
from expertmesh.errors import ConfigError
from expertmesh.serve.answer_marks import AnswerMarks
from expertmesh.serve.faults import RequestError
from expertmesh.serve.schema import (
    ANY,
    HARMLESS,
    INSTEAD,
    REFUSED_OF_MESSAGES,
    RENAMED,
    SPELLED,
    ChatPrompt,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Sampling,
    TokenizeChat,
    TokenizeText,
)
from expertmesh.serve.structured_outputs import GUIDE_FIELDS, Guide, guide_of
from expertmesh.serve.tool_fields import TOOL_FIELDS, ToolUse, read_tool_use
from expertmesh.text.answer_pieces import AnswerParser, PlainParser
from expertmesh.text.format import TextFormat
from expertmesh.text.limits import TextLimitError
from expertmesh.text.messages import our_role
from expertmesh.text.tokenizer import special_ids
from expertmesh.text.tools import read_calls

_DEFAULT_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API."""
_MOST_NAME = 80
"""Maximum characters of a field's name in a message."""
_EFFORTS = ("reasoning_effort", "verbosity")
"""Fields that are variables of templates; without effect where a template does not read them."""
_SPLITS = ("include_reasoning", "separate_reasoning")
"""Whether thoughts are in the answer, and whether they are told from its content."""
_OF_CHATS = (*_EFFORTS, *TOOL_FIELDS)
"""Fields of conversations that are read beside the model's."""
_NO_EFFORT = ("reasoning_effort", "none")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thoughts off."""


@dataclass(frozen=True)
class Job:
    """Parsed request."""

    prompts: Sequence[Sequence[int]]  # token ids of each prompt
    shown: Sequence[str]  # text of each prompt, if it is echoed; else empty
    params: Sequence[SamplingParams]  # sampling parameters of each prompt
    drops_token: bool = False  # whether the one generated token is dropped, because max_tokens is 0
    adapter: str | None = None  # name of the adapter; None: the model alone
    # what the whole answer must be, if that is still to be compiled (`RequestReader.with_rules`)
    guide: Guide | None = None
    # makes the parser of one answer's text; a new one for each answer
    make_parser: Callable[[], AnswerParser] = PlainParser
    has_thoughts: bool = True  # whether the client wants to see thoughts
    # fields of the request that the model does not know, which a header of the response names
    without_effect: tuple[str, ...] = ()


class RequestReader:
    """Parses requests; its methods are thread-safe."""

    def __init__(self, engine: Engine, config: ServerConfig, model_name: str) -> None:
        assert engine.text is not None
        self.text: TextFormat = engine.text
        self.max_len, self.vocab_size = engine.max_len, engine.model.vocab_size
        self._config, self._name = config, model_name
        self._engine = engine
        self.leaving: set[str] = set()  # adapters that new requests do not find, because they are to be unloaded
        self._specials = special_ids(self.text.tokenizer)
        self._marks = AnswerMarks(self.text, config)

    @property
    def model_names(self) -> list[str]:
        """Names that requests may use: the model's, then its adapters'."""
        return [self._name, *(one for one in self._engine.adapters if one not in self.leaving)]

    def adapter_of(self, name: str | None) -> str | None:
        """Adapter of a name; None: the name is the model's, or not given."""
        if name is None or name == self._name:
            return None
        known = self.model_names
        if name not in known:
            shown = name if len(name) < 60 else name[:57] + "..."
            has = ", ".join(map(repr, known))
            has = has if len(has) < 200 else f"{self._name!r} and {len(known) - 1} adapters"
            raise RequestError(
                404,
                f"model: there is no {shown!r}; this server has {has}",
                param="model",
                code="model_not_found",
            )
        return name

    def completion(self, request: CompletionRequest) -> Job:
        """Parse a completion request."""
        adapter = self._check(request)
        if request.logprobs is not None and request.logprobs > self._config.max_logprobs:
            raise _over("logprobs", request.logprobs, self._config.max_logprobs)
        given: list[Any] = as_prompts(request.prompt)
        prompts = [self.prompt_ids(one) if isinstance(one, str) else one for one in given]
        wanted = _DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        for ids in prompts:
            self.check_ids(ids, "prompt")
        shown = []
        if request.echo:
            decode = self.text.tokenizer.decode
            shown = [one if isinstance(one, str) else decode(one) for one in given]
        params = [
            self._params(
                request,
                ids,
                max(wanted, 1),
                logprobs=request.logprobs,
                prompt_logprobs=request.logprobs if request.echo else None,
            )
            for ids in prompts
        ]
        job = Job(prompts, shown, for_prompts(params), wanted == 0, adapter)
        return self._constrained(request, job)

    def chat(self, request: ChatRequest) -> Job:
        """Parse a chat completion request."""
        adapter = self._check(request)
        count = request.top_logprobs
        if count is not None and count > self._config.max_logprobs:
            raise _over("top_logprobs", count, self._config.max_logprobs)
        given = request.model_extra or {}
        use = read_tool_use(given)
        ids = self.chat_ids(request, use)
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        most = self.max_len if wanted is None else max(wanted, 1)
        params = self._params(request, ids, most, logprobs=(count or 0) if request.logprobs else None)
        job = Job([ids], [], [params], wanted == 0, adapter)
        has_thoughts, splits = (_switch(given, name) for name in _SPLITS)
        unread = [one for one in _EFFORTS if given.get(one) and not self._reads(one, given[one])]
        job = replace(job, has_thoughts=has_thoughts, without_effect=tuple(unread))
        said = request.messages[-1].text if request.continue_final_message else ""
        return self._parsed(request, job, use, splits=splits, said=said)

    def _parsed(self, request: ChatRequest, job: Job, use: ToolUse, *, splits: bool, said: str) -> Job:
        """A job whose answers are parsed for thoughts and calls, or are guided."""
        asked = guide_of(request.model_extra or {})
        if asked is not None and not use.callable:
            return self._ruled(job, asked)
        if asked is not None and asked.option != "json_schema":
            raise RequestError(
                400,
                f"{asked.field}: is given beside tools that may be called; send a JSON schema, or tool_choice none",
                param=asked.field,
            )
        is_open = self._marks.is_open(job.prompts[0], said)
        answer = None if use.must_call or asked is None else asked.value
        guides = ["calls"] if use.must_call else [] if answer is None else ["calls", "json"]
        reading = self._marks.reading(use, splits=splits, is_open=is_open, guides=guides)
        kept = self._marks.ids_of(reading.markers)
        params = [one.model_copy(update={"kept_special_ids": kept}) for one in job.params]
        job = replace(job, params=params, make_parser=reading)
        return self._ruled(job, Guide("tools", "json_schema", GuidedCalls(reading, answer))) if guides else job

    def chat_ids(self, request: ChatPrompt, use: ToolUse) -> list[int]:
        """Tokens of a conversation with these tools."""
        if not self.text.can_chat:
            raise RequestError(
                400,
                "messages: this model has no chat template, and did not learn conversations; send `prompt` to "
                "/v1/completions, "
                "or serve a folder with chat_template.jinja, or a run trained on conversations",
                param="messages",
                code="no_chat_template",
            )
        said = [_said(message, number) for number, message in enumerate(request.messages)]
        variables = self._variables(request)
        # guided calls need no prompt that tells of tools, and where none may be called, none need be told
        is_told = self.text.chat.writes("tools") or (use.callable and not use.must_call)
        try:
            return conversation_ids(
                self.text,
                said,
                tools=use.tools if is_told else None,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=bool(request.continue_final_message),
                chat_template_kwargs=variables,
            )
        except ConfigError as error:
            field, code = str(error).partition(":")[0], getattr(error, "code", None)
            raise RequestError(400, str(error), param=field, code=code) from None

    def _variables(self, request: ChatPrompt) -> dict[str, Any]:
        """Variables of the template that the request sets."""
        found: dict[str, Any] = {}
        for name in _EFFORTS:
            value = (request.model_extra or {}).get(name)
            if not isinstance(value, str | None):
                raise RequestError(400, f"{name}: must be text", param=name)
            if value is None:
                continue
            if (name, value) == _NO_EFFORT and (switches := self._switches):
                found |= dict.fromkeys(switches, False)
            elif self.text.chat.writes(name):
                found[name] = value
        return found | dict(request.chat_template_kwargs or {})

    @property
    def _switches(self) -> list[str]:
        """Variables of the template that turn thoughts off."""
        return [one for one in _SWITCHES if one in self.text.chat.variables]

    def _reads(self, name: str, value: Any) -> bool:
        """Whether a field that is a variable of templates has an effect here."""
        is_off = (name, value) == _NO_EFFORT and bool(self._switches)
        return is_off or self.text.chat.writes(name)

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of a text to continue; raises RequestError if the model surely has no room for them."""
        return self._tokens(self.text.prompt_ids, text)

    def tokenize(self, request: TokenizeText | TokenizeChat) -> list[int]:
        """Tokens of a text or of a conversation.

        A text that is only the name of a special token becomes that token, because programs look up its id this way;
        inside a longer text the name is plain text.
        """
        self.adapter_of(request.model)
        if isinstance(request, TokenizeChat):
            harmless = {"add_special_tokens": (False,)}
            refuse_unknown(request.model_extra, known=(*_OF_CHATS, *_SPLITS), harmless=harmless)
            return self.chat_ids(request, read_tool_use(request.model_extra or {}))
        refuse_unknown(request.model_extra)
        if request.add_special_tokens is False and request.prompt in self._specials:
            return [self._specials[request.prompt]]
        if request.add_special_tokens is not False:
            return self.prompt_ids(request.prompt)
        return self._tokens(self.text.ids_of, request.prompt)

    @staticmethod
    def _tokens(encode: Callable[[str], list[int]], text: str) -> list[int]:
        try:
            return encode(text)
        except TextLimitError as error:
            raise RequestError(400, str(error), param="prompt", code=error.code) from None

    def detokenize(self, request: DetokenizeRequest) -> str:
        """Text of tokens."""
        self.adapter_of(request.model)
        refuse_unknown(request.model_extra)
        self.check_ids(request.tokens, "tokens")
        return self.text.tokenizer.decode(request.tokens, skip_special_tokens=False)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise RequestError if an id is not in the vocabulary."""
        if ids and max(ids) >= self.vocab_size:
            raise RequestError(400, f"{param}: token ids must be below {self.vocab_size}", param=param)

    def _check(self, request: Sampling) -> str | None:
        """Requested adapter; raises RequestError if a field is unsupported or invalid."""
        adapter = self.adapter_of(request.model)
        given = request.model_extra or {}
        harmless: dict[str, tuple[Any, ...]] = {
            "best_of": (request.n or 1,),
            "add_special_tokens": (isinstance(request, CompletionRequest),),
            "do_sample": (request.temperature != 0,),
        }
        for name, here in RENAMED.items():
            harmless[name] = (*HARMLESS.get(name, ()), getattr(request, here, given.get(here)))
        known: Iterable[str] = GUIDE_FIELDS
        if isinstance(request, ChatRequest):
            known = (*GUIDE_FIELDS, *_OF_CHATS, *_SPLITS)
        refuse_unknown(given, known=known, harmless=harmless)
        if request.stream_options is not None:
            refuse_unknown(request.stream_options.model_extra, place="stream_options.")
        if request.n is not None and request.n > self._config.max_n:
            raise _over("n", request.n, self._config.max_n)
        self.check_ids(request.stop_token_ids or (), "stop_token_ids")
        return adapter

    def _params(self, request: Sampling, ids: Sequence[int], most: int, **scores: Any) -> SamplingParams:
        room = self.max_len - len(ids)
        if room < 1:
            raise RequestError(
                400,
                f"prompt: has {len(ids)} tokens, and the model has room for {self.max_len} with the answer; shorten it",
                param="prompt",
                code="context_length_exceeded",
            )
        max_tokens = min(most, room, self._config.max_answer or room)
        given: dict[str, Any] = {
            name: one.read(value) for name, one in SPELLED.items() if (value := getattr(request, name)) is not None
        }
        given["max_tokens"] = max_tokens
        given["min_tokens"] = min(given.get("min_tokens", 0), max_tokens)
        if given.get("top_p") == 0:  # the most likely token alone
            given |= {"top_p": None, "top_k": 1}
        try:
            params = SamplingParams(**given, **scores)
        except FieldError as error:
            raise RequestError(400, str(error), param=str(error.location[0])) from None
        self.check_ids(tuple(params.logit_bias), "logit_bias")
        return params

    def _constrained(self, request: Sampling, job: Job) -> Job:
        """A job with what the whole answer must be."""
        guide = guide_of(request.model_extra or {})
        return job if guide is None else self._ruled(job, guide)

    def _ruled(self, job: Job, guide: Guide) -> Job:
        """A job with a guide, compiled if it was before."""
        return self._guided(job, guide, self._engine.answer_rules.known)

    def with_rules(self, job: Job) -> Job:
        """A job whose guide is compiled, which may take seconds."""
        assert job.guide is not None
        return self._guided(job, job.guide, self._engine.answer_rules.compiled)

    @staticmethod
    def _guided(job: Job, guide: Guide, compiled: Callable[[str, Any], Compiled | None]) -> Job:
        try:
            made = compiled(guide.option, guide.value)
        except ConfigError as error:
            said = str(error).removeprefix(f"{guide.field}: ")
            raise RequestError(400, f"{guide.field}: {said}", param=guide.field) from None
        value = guide.value if made is None else made
        params = [one.model_copy(update={guide.option: value}) for one in job.params]
        return replace(job, params=params, guide=guide if made is None else None)


def refuse_unknown(
    fields: Mapping[str, Any] | None,  # fields that the request's model does not have
    *,
    place: str = "",  # path of the object that has them, with a dot
    known: Iterable[str] = (),  # names of those that are read elsewhere
    harmless: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> None:
    """Raise RequestError if a field is unknown and its value could change an answer."""
    for name, value in (fields or {}).items():
        if value is None or name in known or HARMLESS.get(name) is ANY:
            continue
        if value in (*HARMLESS.get(name, ()), *harmless.get(name, ())):
            continue
        why = INSTEAD.get(name, "is no field here, and could change the answer; leave it out")
        shown = f"{place}{name}"[:_MOST_NAME]
        raise RequestError(400, f"{shown}: {why}", param=shown)


def _said(message: Message, number: int) -> dict[str, Any]:
    """A message for the chat template, without the fields that say nothing."""
    given = message.model_extra or {}
    for field, why in REFUSED_OF_MESSAGES.items():
        if given.get(field):
            name = f"messages.{number}.{field}"
            raise RequestError(400, f"{name}: {why}; leave it out", param=name)
    if isinstance(message.content, list):
        for i, part in enumerate(message.content):
            refuse_unknown(part.model_extra, place=f"messages.{number}.content.{i}.")
    more = {name: value for name, value in given.items() if value is not None and name not in REFUSED_OF_MESSAGES}
    if more.get("tool_calls"):
        try:
            more["tool_calls"] = read_calls(more["tool_calls"], f"messages.{number}.tool_calls")
        except ConfigError as error:
            raise RequestError(400, str(error), param=str(error).partition(":")[0]) from None
    return {**more, "role": our_role(message.role), "content": message.said}


def _switch(given: Mapping[str, Any], name: str) -> bool:
    """Value of a field that is true unless it is false."""
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(400, f"{name}: must be true or false; correct it", param=name)
    return value is not False


def as_prompts(given: Any) -> list[Any]:
    """List of prompts, each text or tokens."""
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _over(name: str, value: int, most: int) -> RequestError:
    return RequestError(400, f"{name}={value}: must be at most {most}", param=name)
