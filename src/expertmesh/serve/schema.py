"""Request schemas: OpenAI's fields, and vLLM's extensions. Bounds also appear in the OpenAPI description.

Lists and biases end at their first error: millions of errors would occupy the server for seconds.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from expertmesh.config.base import without_none
from expertmesh.config.sampling import GUIDES, LONGEST_STOP, SamplingParams
from expertmesh.text.chat import RESERVED_VARIABLES
from expertmesh.text.messages import TEXT_OF_PART

MOST_PROMPTS = 1024
MOST_MESSAGES = 10_000
"""Maximum messages of a conversation, and text parts of a message; not in the description, whose readers write lists
of every stated length.
"""


def _whole(value: Any) -> Any:
    """Convert floats without a fraction to int, alone or in a list: JSON has one number type."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and any(type(one) is float for one in value):
        return [_whole(one) for one in value]
    return value


def few(value: Any) -> Any:
    """Raise Pydantic's error of a long list if it has more than `MOST_MESSAGES` items."""
    if type(value) is list and len(value) > MOST_MESSAGES:
        text = "List should have at most {most} items"
        raise PydanticCustomError("too_long", text, {"most": MOST_MESSAGES})
    return value


def _up_to_first_wrong(value: Any) -> Any:
    """Keep only the first wrong bias if there is one: Pydantic has no `fail_fast` for objects."""
    if type(value) is dict:
        for name, bias in value.items():
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                return {name: bias}
    return value


Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Tops = Annotated[int, Field(ge=0, le=20), BeforeValidator(_whole)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), BeforeValidator(_whole)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_up_to_first_wrong)]
AdapterName = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=2**23)]
StopText = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[StopText], Field(fail_fast=True, max_length=16)]


class Spelled(NamedTuple):
    """Option of a request in a body."""

    kind: Any  # type in JSON
    also: tuple[str, ...] = ()  # names of other servers for it, which are refused unless the field has the same value
    read: Callable[[Any], Any] = lambda value: value  # its value in `SamplingParams`


def _declared(name: str, **bounds: Any) -> Any:
    """Type in JSON of an option of `SamplingParams`, within its bounds but for those that are given here."""
    field = SamplingParams.model_fields[name]
    kind = without_none(field.annotation)
    limits = {
        bound: getattr(rule, bound)
        for rule in field.metadata
        for bound in ("ge", "gt", "le", "lt", "max_length")
        if hasattr(rule, bound)
    }
    if get_origin(kind) is tuple:
        kind, limits["fail_fast"] = list.__class_getitem__(get_args(kind)[0]), True
    return Annotated[kind, Field(**limits | bounds), BeforeValidator(_whole)]


_NAMES = ("n_predict", "num_predict", "max_new_tokens", "max_completion_tokens")
_OTHERWISE = {
    "n": Spelled(_declared("n", le=128), ("num_return_sequences",)),
    "temperature": Spelled(_declared("temperature", le=100)),
    "top_k": Spelled(_declared("top_k", ge=-1, le=None), read=lambda k: min(k, 2**63 - 1) if k > 0 else None),
    "top_p": Spelled(_declared("top_p", gt=None, ge=0)),
    "repetition_penalty": Spelled(_declared("repetition_penalty", le=100), ("repeat_penalty",)),
    "logit_bias": Spelled(Biases),
    "seed": Spelled(_declared("seed", ge=None, le=None), ("random_seed",), lambda seed: seed % 2**62),
    "max_tokens": Spelled(_declared("max_tokens", ge=0), _NAMES),
    "min_tokens": Spelled(_declared("min_tokens"), ("min_new_tokens",)),
    "stop": Spelled(StopText | Stops, ("stop_sequences", "stop_strings")),
    "stop_token_ids": Spelled(Annotated[TokenIds, Field(max_length=1024)]),
}
"""Options whose type or names JSON, OpenAI's API or the size of a body asks for; every other one is as it is
declared."""
SPELLED = {
    name: _OTHERWISE.get(name) or Spelled(_declared(name))
    for name in SamplingParams.model_fields
    if name not in ("logprobs", "prompt_logprobs", "kept_special_ids", *GUIDES)
}
"""Fields of a body that are options of a request; the others are asked for by fields of other types."""

ANY: tuple[Any, ...] = ()
HARMLESS: dict[str, tuple[Any, ...]] = {
    # of no effect on an answer
    "user": ANY,
    "metadata": ANY,
    "store": ANY,
    "service_tier": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prompt_cache_options": ANY,
    "max_tool_calls": ANY,
    "inference_geo": ANY,
    "betas": ANY,
    "prediction": ANY,
    "prompt_cache_breakpoint": ANY,
    "diagnostics": ANY,
    "user_profile_id": ANY,
    "workspace_id": ANY,
    "output_schema": ANY,
    "caller": ANY,
    "annotations": ANY,
    "citations": ANY,
    "parallel_tool_calls": ANY,
    "priority": ANY,
    "request_id": ANY,
    "rid": ANY,
    "session_id": ANY,
    "cache_salt": ANY,
    "cache_prompt": ANY,
    "id_slot": ANY,
    "keep_alive": ANY,
    "use_cache": ANY,
    "timings_per_token": ANY,
    "return_progress": ANY,
    "provider": ANY,
    "usage": ANY,
    "guided_decoding_backend": ANY,
    "mm_processor_kwargs": ANY,
    "spaces_between_special_tokens": ANY,
    "include_obfuscation": ANY,
    "cache_control": ANY,
    # of no effect with these values
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "detokenize": (True,),
    "return_full_text": (False,),
    "echo": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "verbosity": ("medium",),
    "speed": ("standard",),
    "mode": ("standard",),
    "context": ("auto",),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "async": (False,),
    "grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "n_predict": (-1,),
    "min_new_tokens": (0,),
    "stop_sequences": ([],),
    "stop_strings": ([],),
    "n_probs": (0,),
    "repeat_penalty": (1.0,),
    "mirostat": (0,),
    "top_a": (0.0,),
    "tfs_z": (1.0,),
    "top_n_sigma": (-1.0, 0.0),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "smoothing_factor": (0.0,),
    "samplers": ([],),
    "watermark": (False,),
}
"""Fields that are not here and change no answer: with any value, or with these. Every other field that is not here is
refused, but for null. Chats read some of them."""

RENAMED = {name: here for here, one in SPELLED.items() for name in one.also} | {"json_schema": "guided_json"}
"""Fields of other servers, with their names here; refused unless the field of that name has the same value."""

_TO_TEMPLATE = "it is a variable of templates; write it into chat_template_kwargs"
_TO_TOOLS = "is a former field; write tools and tool_choice"
INSTEAD = {
    "functions": _TO_TOOLS,
    "function_call": _TO_TOOLS,
    "tools": "only chats have tools; use /v1/chat/completions",
    "tool_choice": "only chats have tools; use /v1/chat/completions",
    "structural_tag": "there are json, choice, regex and grammar (structured_outputs)",
    "documents": _TO_TEMPLATE,
    "enable_thinking": _TO_TEMPLATE,
    "thinking": _TO_TEMPLATE,
    "bad_words": "words are not forbidden; logit_bias makes tokens unlikely",
    "best_of": "answers are not ranked; ask for n of them",
    "prompt_logprobs": "only completions have those of a prompt, by echo and logprobs",
    "n_probs": "is logprobs here, and top_logprobs in chats",
    "reasoning": "its effort is reasoning_effort here",
} | {name: f"its name here is {here}" for name, here in RENAMED.items()}
"""Advice for refused fields, where there is some."""

REFUSED_OF_MESSAGES = {
    "function_call": "is a former field; write tool_calls",
    "prefix": "continue_final_message continues the last message",
    "audio": "only text is supported",
    "images": "only text is supported",
}
"""Unsupported fields of a message that would change an answer, with the reason. The chat template gets the others."""

NULL_ALONE: Any = {"additionalProperties": {"type": "null"}}
"""Part of the description of an object: unknown fields are null."""

TemplateVariables = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"propertyNames": {"not": {"enum": [*RESERVED_VARIABLES]}}}),
]


class RequestObject(BaseModel):
    """Object of a request, whose unknown fields are looked at later."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=NULL_ALONE)


class StreamOptions(RequestObject):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every event


_FIELDS: dict[str, Any] = {
    name: (
        one.kind | None,
        Field(None, description=SamplingParams.model_fields[name].description),
    )
    for name, one in SPELLED.items()
}
_SamplingFields: Any = create_model("_SamplingFields", __base__=RequestObject, **_FIELDS)


class Sampling(_SamplingFields):
    """Fields that completions and chat completions share."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # vLLM's
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(Sampling):
    """Completion request: a text to continue."""

    prompt: (
        Text
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]],
            Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    logprobs: Tops | None = None
    echo: bool | None = None


def one_of(kinds: Iterable[str], what: str, default: str = "") -> BeforeValidator:
    """Refuses objects of other types by the type's name. `default`: type of objects without one."""
    known = tuple(kinds)

    def checked(value: Any) -> Any:
        kind = value.get("type") or default if isinstance(value, dict) else None
        if kind and isinstance(kind, str) and kind not in known:
            why = f"{kind[:60]!r} is not served ({what}); there are {', '.join(known)}"
            raise PydanticCustomError("refused", "{why}", {"why": why, "field": "type"})
        return value

    return BeforeValidator(checked)


class TextPart(RequestObject):
    """Text part of a message, as chats or as responses name it."""

    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(RequestObject):
    """Refusal in an earlier answer, which is a text here."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


_Part = Annotated[TextPart | RefusalPart, one_of(TEXT_OF_PART, "only text is")]


class Message(BaseModel):
    """Message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[_Part], Field(fail_fast=True), BeforeValidator(few)]

    _is_null: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _of_nothing(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """An assistant's content may be null or missing, as beside calls."""
        is_null = isinstance(given, dict) and given.get("role") == "assistant" and given.get("content") is None
        found = read({**given, "content": ""} if is_null else given)
        found._is_null = is_null
        return found

    @property
    def said(self) -> str | None:
        """Text of the message, or None."""
        return None if self._is_null else self.text

    @property
    def text(self) -> str:
        """Concatenated text of the message."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatPrompt(RequestObject):
    """Conversation, and how a prompt is made of it."""

    model_config = ConfigDict(
        json_schema_extra={
            **NULL_ALONE,
            "not": {
                "required": ["add_generation_prompt", "continue_final_message"],
                "properties": {
                    "add_generation_prompt": {"const": True},
                    "continue_final_message": {"const": True},
                },
            },
        },
    )

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1), BeforeValidator(few)]
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(Sampling, ChatPrompt):
    """Chat completion request: a conversation to answer."""

    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None


class TokenizeText(RequestObject):
    """Text to tokenize."""

    model: str | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatPrompt):
    """Conversation to tokenize, followed by the start of an answer."""

    model: str | None = None
    return_token_strs: bool | None = None


class LoadAdapterRequest(RequestObject):
    """Adapter to load, as in vLLM."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadAdapterRequest(RequestObject):
    """Adapter to unload, as in vLLM."""

    lora_name: AdapterName


class DetokenizeRequest(RequestObject):
    """Tokens to convert to text."""

    model: str | None = None
    tokens: TokenIds
